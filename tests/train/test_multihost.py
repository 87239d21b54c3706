"""The recipes of docs/multihost.md: that a shell and Kubernetes can read them, and tigon train."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tigon.train import load

DOCUMENT = Path(__file__).parents[2] / "docs/multihost.md"
HOST = {"HEAD": "node-0", "JOB": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "7"}


def blocks(section: str) -> list[tuple[str, str]]:
    """Language and text of the code under a heading."""
    text = DOCUMENT.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def manifests() -> dict[str, Any]:
    ((_, text),) = [block for block in blocks("Kubernetes") if block[0] == "yaml"]
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def launched(words: list[str]) -> Any:
    """What torchrun makes of its arguments; the settings are read as a run would."""
    at = words.index("torchrun") + 1
    args = get_args_parser().parse_args(words[at:])
    assert args.training_script == "tigon" and args.module
    command, config, *settings = args.training_script_args
    assert (command, config) == ("train", "config.yaml")
    read = load(None, [*settings, "model=m", "data=d"])
    assert read.run_dir.startswith("/shared/") and read.resume == "auto"
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("4", "8", 0)
    assert args.rdzv_backend == "c10d" and args.rdzv_id
    return args


@pytest.mark.parametrize("section", ["torchrun", "Slurm"])
def test_commands_of_a_shell(section: str, tmp_path: Path) -> None:
    """Read by bash, and given to torchrun with what a host's environment has."""
    text = next(text for _, text in blocks(section) if "torchrun" in text)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
    # Commands that only a cluster has print their arguments
    for name, says in (("torchrun", 'echo torchrun "$@"'), ("srun", 'shift; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{says}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'node-0\\nnode-1\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = HOST | {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-[0-3]"}
    ran = subprocess.run(
        ["bash", "-eu"], input=text, text=True, capture_output=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert launched(shlex.split(ran.stdout)).rdzv_endpoint == "node-0:29500"


def test_options_of_slurm() -> None:
    """A task for each host, whatever else it asks for."""
    ((_, text),) = [block for block in blocks("Slurm") if "#SBATCH" in block[1]]
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert text.startswith("#!/bin/bash\n") and text.splitlines()[1 : len(lines) + 1] == lines
    words = [w for line in lines for w in line.split("#SBATCH")[1].split(" #")[0].split()]
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
    assert all(word.startswith("--") for word in words)
    assert options["ntasks-per-node"] == "1" and options["nodes"] == "4"
    assert "requeue" in options and options["signal"] == "TERM@300"


def test_manifests_of_kubernetes() -> None:
    found = manifests()
    service, job = found["Service"], found["Job"]
    spec = job["spec"]["template"]["spec"]
    ((container),) = spec["containers"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    args = launched(container["command"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(args.nnodes)
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == args.nproc_per_node
    # The first pod's name, by the service that the pods are of
    name, domain = job["metadata"]["name"], spec["subdomain"]
    assert args.rdzv_endpoint == f"{name}-0.{domain}:29500"
    assert service["metadata"]["name"] == domain and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert "/dev/shm" in places and "/shared" in places
