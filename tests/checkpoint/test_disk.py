"""What a tag's folder shows of saves that were interrupted."""

import os

from ds_kfac.checkpoint.files import older_files


def test_files_from_before_a_save_are_of_another_one(tmp_path):
    header = tmp_path / "kfac" / "aaaabbbbcccc" / "header.json"
    header.parent.mkdir(parents=True)
    for path, second in (
        (header, 100),
        (tmp_path / "old_optim_states.pt", 99),
        (tmp_path / "new_model_states.pt", 101),
    ):
        path.touch()
        os.utime(path, (second, second))
    assert older_files(tmp_path, "aaaabbbbcccc") == ["old_optim_states.pt"]
    assert older_files(tmp_path, "no such save") == []
