"""Tasks on files that the user names: where a file is looked for, and how it is identified."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.settings import setting
from fedapps.tasks.base import DATA_VARIABLE, Task
from fedapps.tasks.compressed import find_compressed


class OwnFilesTask(Task):
    """A task on a training file and, if there is one, a test file; what the tasks on files of all formats share."""

    FOLDER: ClassVar[str]
    """Sub-folder of the data folder that is looked at, too."""

    FORMAT: ClassVar[str]
    """What a file must be, for messages: ``"a LIBSVM file"``."""

    EXAMPLE: ClassVar[str]
    """Name of a file, for messages."""

    ADVICE: ClassVar[str]
    """What to do about a file that is not there, beside setting the data folder."""

    class Options(Task.Options):
        """The files."""

        file: str = setting("", "training file: a path, or a name in the data folder", path=True)
        test_file: str = setting("", "test file; empty = no test set", path=True)

    @override
    def places(self, name: str) -> list[Path]:
        """Look in the data folder, and there in the task's own folder."""
        path, folder = Path(name).expanduser(), self.data_dir
        folders = [folder, folder / self.FOLDER] if folder else []
        return [path] if path.is_absolute() else [folder / path for folder in folders]

    @override
    def checksums(self) -> dict[str, str]:
        """Identify the files: folder and name, such as ``libsvm/a9a.gz`` -> SHA-256 of its bytes."""
        return {
            f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.files.values()
        }

    @cached_property
    def files(self) -> dict[str, Path]:
        """Option -> file; the training file first, the test file only if there is one.

        Raises:
            TaskError: The training file is not named, or a file is not there.
        """
        wanted = {"file": self.options.file, "test-file": self.options.test_file}
        if not wanted["file"]:
            raise TaskError(
                f"task '{self.name}', option 'file'",
                expected=f"the name or path of {self.FORMAT}",
                got="nothing",
                do=f"set task-options='file = \"{self.EXAMPLE}\"'",
            )
        return {key: self._find(name) for key, name in wanted.items() if name}

    def _find(self, name: str) -> Path:
        places = self.places(name)
        if found := find_compressed(places):
            return found
        looked = " and ".join(map(str, places)) or f"no folder, since neither --data-dir nor {DATA_VARIABLE} is set"
        raise TaskError(
            f"task '{self.name}', file '{name}'",
            expected="a file of that name, plain or with .gz, .xz or .bz2 appended",
            got=f"none; looked at {looked}",
            do=f"{self.ADVICE} and set --data-dir or {DATA_VARIABLE} to its folder",
        )
