#pragma once
#include "../lily/tensor.h"
