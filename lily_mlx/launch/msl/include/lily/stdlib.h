// Everything <metal_stdlib> brings except tensors.
#pragma once
#pragma clang system_header

#include "atomic.h"
#include "matrix.h"
#include "simdgroup_matrix.h"
#include "constants.h"
