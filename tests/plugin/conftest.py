"""Running an mlx_lm command inside the test process: the way of its console script, without its start."""

import importlib
import sys

import pytest

from lily_mlx import commands, hook
from lily_mlx.errors import LilyError


@pytest.fixture
def run_in_process(capsys, monkeypatch):
    """Run ``mlx_lm.<command>`` and return (exit status, stdout, stderr); at the end all is stock's again."""

    def run(command, *arguments, engine="lily"):
        hook.install()
        module = importlib.import_module(f"mlx_lm.{command}")
        flag = ["--engine", engine] if engine else []
        monkeypatch.setattr("sys.argv", [f"mlx_lm.{command}", *flag, *map(str, arguments)])
        status = 0
        try:
            module.main()
        except SystemExit as stopped:
            status = stopped.code
        except LilyError as error:  # in a real process it would end here
            with pytest.raises(SystemExit) as stopped:
                sys.excepthook(type(error), error, error.__traceback__)
            status = stopped.value.code
        return status, *capsys.readouterr()

    yield run
    commands.restore()
