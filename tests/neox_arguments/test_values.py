"""Values as users and other programs write them: paths, numbers."""

from pathlib import Path

import pytest

from megatron.launch.environment import LaunchError, port_of, read_integer
from megatron.neox_arguments.values.local_paths import UnknownHomeError, with_home


def test_the_home_folder_of_an_unknown_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/h")
    assert with_home("~/run") == Path("/h/run") and with_home("run/~") == Path("run/~")
    with pytest.raises(UnknownHomeError, match="~nobody-of-here"):
        with_home("~nobody-of-here/run")
    (tmp_path / "~folder").mkdir()
    assert with_home("~folder/run") == Path("~folder/run")


def test_numbers_of_the_environment() -> None:
    assert port_of(" 29500") == 29500 and read_integer({"RANK": " 007 "}, "RANK") == 7
    for text in ("²", "9" * 5000, "1e3", ""):
        with pytest.raises(LaunchError, match="RANK"):
            read_integer({"RANK": text}, "RANK")
