"""How a save becomes a checkpoint: written beside its place, published by a rename (§9.1).

    DIR/.saving-TAG          a save under way, or what a dead one left
    DIR/.replaced-TAG        the old checkpoint, while a new one of the same tag takes its place

A process may die between any two steps, and the newest checkpoint stays loadable: until the rename it is
untouched; between the two renames of a re-save it is found under its second name; `latest` is replaced after
both. The next save clears what a dead one left. All ranks see one file system, and one job at a time saves
into a folder.
"""

from __future__ import annotations

import os
import shutil

from ds_lite.saving.files import LATEST, MANIFEST, tags_in, to_disk

_SAVING, _REPLACED = ".saving-", ".replaced-"
_SUFFIX = "_states.pt"  # of our files


def find_checkpoint(load_dir: str, tag: str) -> str:
    """The folder of a checkpoint.

    Raises: ValueError if there is none; it lists the tags that are there.
    """
    for name in (tag, _REPLACED + tag):  # the second: a re-save died between its renames
        if os.path.isdir(folder := os.path.join(load_dir, name)):
            return folder
    there = f"the folder has {tags_in(load_dir)}" if os.path.isdir(load_dir) else "the folder does not exist"
    raise ValueError(
        f"no checkpoint {tag!r} in {load_dir}: {there}; correct load_dir, the tag, or what `latest` says "
        f"(§9.1)"
    )


class Publication:
    """One save: a temporary folder in `save_dir`, and the steps that make it the checkpoint `tag`.

    One rank calls the methods; every rank may write into `folder` between `start` and `publish`.
    """

    def __init__(self, save_dir: str, tag: str) -> None:
        self.save_dir, self.tag = save_dir, tag
        self.folder = os.path.join(save_dir, _SAVING + tag)

    def start(self) -> None:
        """Clear what dead saves left, and make the empty folder.

        Raises: ValueError for a `save_dir` that is no folder.
        """
        try:
            os.makedirs(self.save_dir, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"save_dir={self.save_dir!r} is a file or lies below one; name a folder (§9.1)"
            ) from None
        _clear_leftovers(self.save_dir)
        os.mkdir(self.folder)

    def check_place(self) -> None:
        """Raises: ValueError if something that is not a checkpoint has the name already."""
        final = os.path.join(self.save_dir, self.tag)
        is_checkpoint = os.path.exists(os.path.join(final, MANIFEST))
        is_free = not os.path.lexists(final) or (os.path.isdir(final) and not os.listdir(final))
        if not is_checkpoint and not is_free:
            raise ValueError(
                f"{final} exists and is not a checkpoint of ds_lite, so it is not replaced; choose another "
                f"tag or move it away (§9.1)"
            )

    def check_visible(self) -> None:
        """Raises: ValueError on a rank that does not see the folder that another rank has made."""
        if not os.path.isdir(self.folder):
            raise ValueError(
                f"save_dir={self.save_dir!r} is not the folder that rank 0 sees: {self.folder} is missing "
                f"here; all ranks name one folder on a shared file system (§9.1)"
            )

    def publish(self, *, with_latest: bool) -> None:
        """Give the folder its name, let `latest` name it, and drop the checkpoint that had the name."""
        final, replaced = (os.path.join(self.save_dir, name) for name in (self.tag, _REPLACED + self.tag))
        _folder_to_disk(self.folder)
        has_old = os.path.lexists(final)
        if has_old:
            os.rename(final, replaced)
        try:
            os.rename(self.folder, final)
        except OSError:
            if has_old:
                os.rename(replaced, final)
            raise
        _folder_to_disk(self.save_dir)
        if with_latest:
            self.point_latest()
        if has_old:
            _retire(replaced, final)

    def point_latest(self) -> None:
        """Let `latest` name this checkpoint, by one rename."""
        temporary = os.path.join(self.save_dir, _SAVING + LATEST)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(self.tag)
            to_disk(file)
        os.replace(temporary, os.path.join(self.save_dir, LATEST))
        _folder_to_disk(self.save_dir)

    def publish_file(self) -> None:
        """Move the file that is called like the tag into `save_dir`, in place of an older one."""
        os.replace(os.path.join(self.folder, self.tag), os.path.join(self.save_dir, self.tag))
        _folder_to_disk(self.save_dir)
        self.discard()

    def discard(self) -> None:
        """Remove the temporary folder, as far as that is possible."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder_to_disk(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear_leftovers(save_dir: str) -> None:
    for name in os.listdir(save_dir):
        path = os.path.join(save_dir, name)
        if name.startswith(_REPLACED):
            final = os.path.join(save_dir, name.removeprefix(_REPLACED))
            _retire(path, final) if os.path.lexists(final) else os.rename(path, final)
        elif name.startswith(_SAVING):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _retire(replaced: str, final: str) -> None:
    """Remove a checkpoint that has a successor; what others had put beside its files moves along."""
    if os.path.islink(replaced):
        os.unlink(replaced)
        return
    for name in os.listdir(replaced):
        is_ours = name == MANIFEST or name.endswith(_SUFFIX)
        if not is_ours and not os.path.lexists(os.path.join(final, name)):
            os.rename(os.path.join(replaced, name), os.path.join(final, name))
    shutil.rmtree(replaced)
