"""The script of docs/tutorial/first_run.md trains, switches, saves and resumes as the page says."""

import json
import re

import pytest

from tests.programs import python
from tests.ranks import ROOT

PAGE = (ROOT / "docs/tutorial/first_run.md").read_text()
SCRIPT = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[1]
CONFIG = re.search(r"^```json\n(.*?)^```", PAGE, re.M | re.S)[1]
HEADER = "from torch import nn\n"


def run(folder, script: str, config: dict, *arguments: str) -> str:
    """What the script prints with a config, in one process without a launcher."""
    (folder / "first_run.py").write_text(script)
    (folder / "config.json").write_text(json.dumps(config))
    command = ["first_run.py", "--config", "config.json", *arguments]
    done = python(*command, folder=folder, path=str(ROOT))
    return done.stdout + done.stderr


@pytest.mark.distributed
def test_the_script_switches_saves_and_resumes(tmp_path):
    assert "import ds_kfac" not in SCRIPT
    script = SCRIPT.replace(HEADER, f"{HEADER}\nimport ds_kfac\n")
    # ten steps, not a hundred
    script = script.replace("= deepspeed.init", "= ds_kfac.init").replace("% 25 ==", "% 10 ==")
    config = json.loads(CONFIG)
    config["optimizer"]["type"] = "KFACAdamW"
    report = run(tmp_path, script, config, "--steps", "5", "--save", "step5")
    shown = " ".join(re.search(r"^```text\n(ds_kfac updates.*?)^```", PAGE, re.M | re.S)[1].split())
    for line in report.splitlines():
        if line.startswith(("ds_kfac updates", "  all other", "  step:", "  factors every")):
            assert " ".join(line.split()) in shown
    straight = run(tmp_path, script, config, "--steps", "10")
    resumed = run(tmp_path, script, config, "--load", "step5", "--steps", "10")
    assert "loaded K-FAC state of step 5 from checkpoints/step5" in resumed
    (loss,) = re.findall(r"^step 10 .*", straight, re.M)
    assert loss in resumed
