"""The folders of checkpoints: their names, their order, which are kept."""

import pytest

import jdistgrad as jd
from jdistgrad.saving import files


def save(path, step, text, keep=3):
    """Publish a checkpoint as a save does."""
    folder = files.begin(path, step)
    (folder / "data").write_text(text)
    files.publish(folder, step, {"step": step})
    files.remove_all_but(path, keep)


def there(path):
    return [(step, (one / "data").read_text()) for step, one in files.complete(path)]


def test_a_step_that_is_saved_again_and_again(tmp_path):
    for text in ("first", "second", "third", "fourth", "fifth"):
        save(tmp_path, 120, text)
        assert there(tmp_path) == [(120, text)]
    save(tmp_path, 7, "another")
    save(tmp_path, 120, "sixth")
    assert there(tmp_path) == [(7, "another"), (120, "sixth")]


def test_a_new_run_among_later_steps_keeps_what_it_saved(tmp_path):
    for step in (1000, 2000, 3000):
        save(tmp_path, step, "old")
    save(tmp_path, 100, "new")
    assert there(tmp_path) == [(2000, "old"), (3000, "old"), (100, "new")]
    save(tmp_path, 200, "new", keep=2)
    assert there(tmp_path) == [(100, "new"), (200, "new")]


def test_a_damaged_manifest_is_named(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / files.MANIFEST).write_text("{")
    with pytest.raises(jd.CheckpointError, match=r"3/manifest\.json is damaged: .*Remove that folder"):
        save(tmp_path, 4, "next")


def test_a_full_disk_under_the_manifest_leaves_the_last_checkpoint(tmp_path):
    files.publish(files.begin(tmp_path, 1), 1, {})
    folder = files.begin(tmp_path, 2)
    (folder / files.MANIFEST).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        files.publish(folder, 2, {})
    assert [step for step, _ in files.complete(tmp_path)] == [1]
    files.publish(files.begin(tmp_path, 2), 2, {})
    assert [step for step, _ in files.complete(tmp_path)] == [1, 2]
    assert not folder.exists()


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(tmp_path):
    assert files.complete(tmp_path / "none") == []
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError):
        files.complete(loop)
