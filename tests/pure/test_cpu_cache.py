"""The folder of compiled kernels: where it lies, whom it belongs to, its key, and clearing out old ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hipfire.base.cpu_cache import VARIABLE, CacheDir, kernel_cache_dir, prune, source_key
from hipfire.base.errors import UnsupportedError, ValidationError

KEY = "0123456789abcdef01234567"
OWN = Path("hipfire", "kernels", KEY)
NOBODY = 54321
HINT = "; set HIPFIRE_KERNEL_CACHE to a folder of yours that can be written"
Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs the owners and rights of POSIX")


@pytest.fixture
def place(monkeypatch: Patch, tmp_path: Path) -> Path:
    """A machine of its own: home `home`, temporary files in `temp`, a plain file `file`."""
    for name in ("home", "temp"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return tmp_path


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that any user may reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="hipfire-test-"))
    folder.chmod(0o1777)
    if not all(parent.stat().st_mode & 0o001 for parent in folder.parents):
        pytest.skip("the folder of temporary files is closed to other users")
    yield folder
    shutil.rmtree(folder)


def find(chosen: object = "", platform: str = "linux", **environment: str) -> CacheDir:
    """Return the folder for KEY, with a chosen folder and with other variables."""
    return kernel_cache_dir(KEY, environment={VARIABLE: str(chosen), **environment}, platform=platform)


def names(base: Path) -> set[str]:
    return {path.name for path in base.iterdir()}


def refuse(*args: object, **options: object) -> None:
    """Stand for a call that the system refuses."""
    raise PermissionError(13, "Permission denied")


def find_as_another_user(environment: Mapping[str, str], before: str = "") -> list[str]:
    """Return path and problem in a program with this environment; root becomes a user that no file knows."""
    # after the imports: that user may not be able to read the modules
    program = (
        "import os, resource, tempfile\nfrom hipfire.base.cpu_cache import kernel_cache_dir\n"
        f"if os.geteuid() == 0: os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"{before}\nfound = kernel_cache_dir({KEY!r})\nprint(found.path)\nprint(found.problem)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_places_have_an_order(place: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(place)
    home, xdg, local = place / "home", place / "xdg", place / "local"
    assert find(place / "mine", XDG_CACHE_HOME=str(xdg)) == CacheDir(place / "mine" / KEY, None)
    assert find("here").path == place / "here" / KEY
    assert find("~/there").path == home / "there" / KEY
    assert find("  ", XDG_CACHE_HOME=str(xdg)) == CacheDir(xdg / OWN, None)
    # a relative path there is to be ignored
    assert find(XDG_CACHE_HOME="xdg2") == CacheDir(home / ".cache" / OWN, None)
    assert find(platform="darwin") == CacheDir(home / "Library" / "Caches" / OWN, None)
    assert find(platform="win32") == CacheDir(home / "AppData" / "Local" / OWN, None)
    assert find(platform="win32", LOCALAPPDATA=str(local)) == CacheDir(local / OWN, None)
    assert find(LOCALAPPDATA=str(local)) == CacheDir(home / ".cache" / OWN, None)


def test_new_folders_are_closed_to_others_and_hold_a_fresh_stamp_only(place: Path) -> None:
    path = place / "home" / ".cache" / OWN
    assert find().path == path
    assert {folder.stat().st_mode & 0o777 for folder in (path, *path.parents[:3])} == {0o700}
    assert names(path) == {".used"}
    os.utime(path / ".used", (1, 1))
    assert find().path == path
    assert time.time() - (path / ".used").stat().st_mtime < 60


@pytest.mark.parametrize("key", ["", "..", "a/b", ".used", "a\\b", "c:x"])
def test_a_key_that_is_no_file_name_is_an_error(place: Path, key: str) -> None:
    with pytest.raises(ValidationError, match="kernel cache key"):
        kernel_cache_dir(key, environment={"HIPFIRE_KERNEL_CACHE": str(place / "mine")})
    assert not (place / "mine").exists()


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ("{}/file/mine", "{}/file/mine: Not a directory"),
        ("{}/a\0b", "{}/a\\x00b: embedded null byte"),
        ("~no-such-user-here/x", "HIPFIRE_KERNEL_CACHE: the home folder in"),
        ("{}/dangling", "{}/dangling: File exists"),
        ("{}/linked", f"{{}}/linked/{KEY} is a link or a file, not a folder"),
        ("{}/open", f"{{}}/open/{KEY} is open to other users"),
    ],
)
def test_a_chosen_folder_that_fails_is_told_and_passed_over(place: Path, chosen: str, fault: str) -> None:
    for name in ("elsewhere", "linked", f"open/{KEY}"):
        (place / name).mkdir(parents=True)
    (place / "dangling").symlink_to(place / "gone")
    (place / "linked" / KEY).symlink_to(place / "elsewhere")
    (place / "open" / KEY).chmod(0o777)
    found, problem = find(chosen.format(place)), str(find(chosen.format(place)).problem)
    assert found.path == place / "home" / ".cache" / OWN
    assert problem.startswith(f"compiled kernels are kept in {found.path.parent}: {fault.format(place)}")
    assert problem.endswith(HINT)
    assert names(place / "elsewhere") == set()


def test_no_place_at_all_means_memory_only(place: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", str(place / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(place / "file"))
    found = find(XDG_CACHE_HOME=f"{place}/file/xdg")
    problem = str(found.problem)
    assert problem.startswith("compiled kernels are not kept for the next run: ")
    assert (found.path, problem.count("Not a directory")) == (None, 3)
    assert f"{place}/file/hipfire-kernels-{os.geteuid()}: Not a directory{HINT}" in problem


def test_a_folder_whose_path_leaves_no_room_for_names_is_passed_over(place: Path) -> None:
    room, deep = os.pathconf(place, "PC_PATH_MAX"), place
    while len(str(deep)) < room - 300:
        deep /= "d" * 100
    # the folder itself still fits, the compiler's files in it would not
    deep /= "e" * (room - len(str(deep)) - 100)
    deep.mkdir(parents=True)
    found = find(deep)
    assert ((deep / KEY).is_dir(), found.path) == (True, place / "home" / ".cache" / OWN)
    assert f"{deep}: File name too long" in str(found.problem)


def test_a_folder_of_another_user_is_not_trusted(place: Path, monkeypatch: Patch) -> None:
    assert find(place / "mine").problem is None
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    found = find(place / "mine")
    assert found.path is None
    assert str(found.problem).count("belongs to another user") == 3


@pytest.mark.parametrize("trap", ["link", "file", "open"])
def test_a_trap_among_temporary_files_is_not_used(place: Path, monkeypatch: Patch, trap: str) -> None:
    monkeypatch.setenv("HOME", "relative")
    own = place / "temp" / f"hipfire-kernels-{os.geteuid()}"
    for name, mode in (("closed", 0o700), ("open", 0o750)):
        (place / name).mkdir()
        (place / name).chmod(mode)
    own.symlink_to(place / "closed") if trap == "link" else (place / trap).rename(own)
    found = find()
    assert f"the home folder 'relative' is not an absolute path, {own}" in str(found.problem)
    assert (found.path, names(place / "closed")) == (None, set())
    own.rename(place / "away")
    assert find().path == own / KEY
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", [None, "/nonexistent", "", "{}/read-only"])
def test_a_user_without_a_home_gets_a_private_temporary_folder(open_place: Path, home: str | None) -> None:
    if home is None and os.geteuid() != 0:
        pytest.skip("only root can become a user that no file knows")
    (open_place / "read-only").mkdir(mode=0o555)
    variables = {} if home is None else {"HOME": home.format(open_place)}
    lines = find_as_another_user({"TMPDIR": str(open_place), **variables})
    base = Path(lines[0]).parent
    assert base.name == f"hipfire-kernels-{base.stat().st_uid}"
    assert (base.parent, base.stat().st_mode & 0o777) == (open_place, 0o700)
    assert lines[1].startswith(f"compiled kernels are kept in {base}: ")
    assert ("this user has no home folder" if home is None else "Permission denied") in lines[1]
    # the second run finds it again
    assert find_as_another_user({"TMPDIR": str(open_place), **variables}) == lines


def test_a_disk_that_takes_names_but_no_bytes_is_found_out(open_place: Path) -> None:
    # the choice of a folder for temporary files writes to it too, and is made before
    full = "tempfile.gettempdir()\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    path, problem = find_as_another_user({"HOME": "/nonexistent", "TMPDIR": str(open_place)}, full)
    (own,) = open_place.iterdir()
    assert f"{own}: File too large" in problem
    assert (path, names(own / KEY)) == ("None", set())


def make_cache(base: Path, name: str, age_days: float | None) -> Path:
    """Make a folder with a kernel, last used so many days ago (None: without a stamp); return the kernel."""
    kernel = base / name / "inner" / "kernel.nbi"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"x")
    if age_days is not None:
        (base / name / ".used").touch()
        os.utime(base / name / ".used", (time.time() - age_days * 86400,) * 2)
    return kernel


def test_folders_unused_for_long_are_removed(place: Path) -> None:
    base = place / "base"
    for name, age in (("old", 31), ("young", 29), ("keep", 99), ("photos", None), (KEY, 99)):
        make_cache(base, name, age)
    assert find(base).path == base / KEY  # in use again
    shutil.copy(place / "file", base / "file")
    prune(base, "keep")
    assert names(base) == {"young", "keep", "photos", KEY, "file"}
    for wrong in (base / "gone", base / "file", base / "a\0b"):
        prune(wrong, "keep")
    prune(base, "keep", days=10)
    assert names(base) == {"keep", "photos", KEY, "file"}
    assert len(list(base.rglob("kernel.nbi"))) == 3


def test_links_and_folders_of_others_stay(tmp_path: Path, monkeypatch: Patch) -> None:
    base, outside = tmp_path / "base", tmp_path / "outside"
    kernels = [make_cache(outside, "old", 99), make_cache(base, "stamped", None)]
    old = make_cache(base, "old", 99)
    (base / "old" / "out").symlink_to(outside / "old")
    (base / "link").symlink_to(outside / "old")
    (base / "stamped" / ".used").symlink_to(outside / "old" / ".used")
    os.utime(base / "stamped" / ".used", (1, 1), follow_symlinks=False)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    prune(base, "keep")
    assert old.exists()
    monkeypatch.undo()
    prune(base, "keep")
    assert names(base) == {"link", "stamped"}
    assert all(kernel.exists() for kernel in kernels)


def test_what_cannot_be_removed_stays_without_an_error(tmp_path: Path, monkeypatch: Patch) -> None:
    make_cache(tmp_path, "old", 99)
    monkeypatch.setattr(os, "rmdir", refuse)
    prune(tmp_path, "keep")
    assert names(tmp_path) == {"old"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two files, one in a folder of its own."""
    for name in ("kernel", "inner/helper"):
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / f"{name}.py").write_bytes(b"x = 1\n")
    return tmp_path / "package"


def test_a_key_depends_on_every_source_and_not_on_its_place(package: Path, tmp_path: Path) -> None:
    keys = [source_key([package], ["avx2"])]
    assert re.fullmatch("[0-9a-f]{24}", keys[0])
    elsewhere = shutil.copytree(package, tmp_path / "elsewhere")
    (elsewhere / "kernel.pyc").write_bytes(b"x")
    assert source_key([elsewhere], ["avx2"]) == keys[0]
    helper, new = package / "inner" / "helper.py", package / "inner" / "new.py"
    times = helper.stat()
    helper.write_bytes(b"x = 2\n")
    # same size, same time: only the bytes tell
    os.utime(helper, ns=(times.st_atime_ns, times.st_mtime_ns))
    keys.append(source_key([package], ["avx2"]))
    for edit in (lambda: helper.rename(new), helper.touch, new.unlink):
        edit()
        keys.append(source_key([package], ["avx2"]))
    assert len(set(keys)) == 5


def test_every_folder_and_every_other_fact_changes_the_key(package: Path, tmp_path: Path) -> None:
    folders = ([package], [package / "inner"], [package, package / "inner"], [package / "inner", package])
    facts: tuple[list[str], ...] = ([], [""], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""])
    assert len({source_key(some, extra) for some in folders for extra in facts}) == 24
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "z.py").touch()
    before = source_key([package, tmp_path / "next"], [])
    (package / "kernel.py").rename(tmp_path / "next" / "kernel.py")
    assert source_key([package, tmp_path / "next"], []) != before


def test_without_readable_sources_there_is_no_key(package: Path, monkeypatch: Patch) -> None:
    # what an editor leaves beside an open file is no source
    (package / ".#kernel.py").symlink_to("user@host.1")
    assert source_key([package], [])
    with pytest.raises(UnsupportedError, match=f"no Python files are in {package}/gone"):
        source_key([package, package / "gone"], [])
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UnsupportedError, match=f"{package}: Permission denied"):
        source_key([package], [])
