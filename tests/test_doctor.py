"""`tileweave doctor`: what it finds on this machine, and on machines that are made up."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import tileweave
from tileweave.cli import main, probe
from tileweave.fabric import processes


class TestHere:
    def test_json(self, capsys):
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["backends"].keys() == {"emulated", "virtual", "processes", "fallback"}
        assert found["backends"]["emulated"]["works"]
        assert all(state["reason"] for state in found["backends"].values())
        assert found["torch"].startswith(torch.__version__)
        assert len(found["peer_access"]) == len(found["gpus"])

    @pytest.mark.parametrize(("name", "value"), [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")])
    def test_the_environment_may_forbid_multicast(self, monkeypatch, capsys, name, value):
        monkeypatch.setenv(name, value)
        assert main(["doctor", "--json"]) == 0
        multicast = json.loads(capsys.readouterr().out)["multicast"]
        assert multicast["allowed"] is False
        assert name in multicast["reason"]

    def test_text(self, capsys):
        assert main(["doctor"]) == 0
        text = capsys.readouterr().out
        assert tileweave.__version__ in text
        assert all(name in text for name in ("python", "torch", "driver", "nvlink", "emulated", "virtual", "processes"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu_what_is_unknown_says_why(self, capsys):
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        for fact in ("peers", "links", "handles", "multicast"):
            assert found[fact]["why"] == "PyTorch sees no CUDA GPU"
        assert any("Hopper GPU" in advice for advice in found["advice"])

    @pytest.mark.parametrize(("system", "advised"), [("Linux", True), ("Darwin", False)])
    def test_a_missing_triton_is_something_to_do_where_it_exists(self, monkeypatch, capsys, system, advised):
        monkeypatch.setattr("tileweave.cli.doctor.HAS_TRITON", False)
        monkeypatch.setattr("platform.system", lambda: system)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        assert main(["doctor"]) == 0
        assert ("pip install 'triton>=3.6'" in capsys.readouterr().out) == advised

    @pytest.mark.gpu
    def test_on_a_gpu_everything_is_known(self, capsys):
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        count = len(found["gpus"])
        assert found["handles"]["posix_fd"] == [True] * count
        assert len(found["multicast"]["offered"]) == count
        links = found["links"]["nvlinks"]
        assert len(links) == count if links is not None else found["links"]["why"]  # one GPU alone may show none
        assert found["driver"]["version"][0].isdigit()
        assert found["backends"]["virtual"]["works"]
        assert count == 1 or found["peers"]["native_atomics"][0][1] is not None


SMI = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-aaaa-1)
\t Link 0: <inactive>
\t Link 1: 26.562 GB/s
"""


# By what is characteristic in an attribute's name.
ATTRIBUTES = {"MULTICAST": 1, "POSIX_FILE": 1, "FABRIC": 0, "PERFORMANCE_RANK": 0, "NATIVE_ATOMIC": 1}


class FakeMachine:
    """A machine of two GPUs as PyTorch, the driver and nvidia-smi would show it."""

    def __init__(self, monkeypatch, capability=(9, 0), reach=True, smi=SMI, bindings=True):
        self.smi = smi
        gpus = [
            SimpleNamespace(
                name="NVIDIA H200", major=capability[0], minor=capability[1], uuid=uuid,
                multi_processor_count=132, total_memory=141 << 30,
            )
            for uuid in ("aaaa-0", "aaaa-1")
        ]  # fmt: skip
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: len(gpus),
            "get_device_properties": lambda index: gpus[index],
            "get_device_capability": lambda device: capability,
            "get_device_name": lambda device: "NVIDIA H200",
            "can_device_access_peer": lambda a, b: reach,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(probe, "nvidia_smi", self.nvidia_smi)
        monkeypatch.setattr(processes, "find_spec", lambda name: bindings or None)
        monkeypatch.setattr("tileweave.lang.HAS_TRITON", True)
        if bindings:
            monkeypatch.setattr(probe, "_driver_call", self.driver_call)
        else:
            monkeypatch.setitem(sys.modules, "cuda.bindings", None)

    def nvidia_smi(self, *arguments):
        if isinstance(self.smi, Exception):
            raise self.smi
        return self.smi if arguments[0] == "nvlink" else "580.159.04\n580.159.04\n"

    def driver_call(self, function, kind, attribute, *gpus):
        return next(value for name, value in ATTRIBUTES.items() if name in attribute)


class TestOnAFakeMachine:
    def examined(self, capsys):
        """What doctor finds, and its text."""
        assert main(["doctor", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["doctor"]) == 0
        return found, capsys.readouterr().out

    def test_two_linked_gpus(self, monkeypatch, capsys):
        FakeMachine(monkeypatch)
        found, text = self.examined(capsys)
        assert found["links"] == {"nvlinks": [2, 1], "gb_per_s": [53.1, 26.6], "why": None}
        assert found["peers"]["native_atomics"] == [[None, True], [True, None]]
        assert found["handles"] == {"posix_fd": [True, True], "fabric": [False, False], "why": None}
        assert found["multicast"]["offered"] == [True, True]
        assert all(found["backends"][name]["works"] for name in ("virtual", "processes"))
        assert "gpu 1 (native atomics, performance rank 0)" in text
        assert "gpu 0: 2 links, 53.1 GB/s each way" in text
        assert "file descriptor: yes" in text

    def test_gpus_that_do_not_reach_each_other(self, monkeypatch, capsys):
        FakeMachine(monkeypatch, reach=False)
        found, text = self.examined(capsys)
        assert not found["backends"]["processes"]["works"]
        assert "GPUs 0 and 1 do not reach each other's memory" in found["backends"]["processes"]["reason"]
        assert "no other GPU" in text
        assert any("must reach each other" in advice for advice in found["advice"])

    def test_other_gpus_than_hopper(self, monkeypatch, capsys):
        FakeMachine(monkeypatch, capability=(8, 0))
        found, _ = self.examined(capsys)
        assert not found["backends"]["virtual"]["works"]
        assert "GPU 1: NVIDIA H200 is sm_80, not sm_90" in found["backends"]["processes"]["reason"]
        assert any("Hopper GPU" in advice for advice in found["advice"])

    @pytest.mark.parametrize("tried", [False, True])
    def test_blackwell_is_tried_where_the_environment_says_so(self, monkeypatch, capsys, tried):
        FakeMachine(monkeypatch, capability=(10, 0))
        monkeypatch.setenv("TILEWEAVE_EXPERIMENTAL", "sm100" if tried else "")
        found, _ = self.examined(capsys)
        assert all(found["backends"][name]["works"] is tried for name in ("virtual", "processes"))
        assert tried or "TILEWEAVE_EXPERIMENTAL=sm100" in found["backends"]["virtual"]["reason"]
        assert any("never run on one" in advice for advice in found["advice"])

    def test_without_cuda_bindings_and_nvidia_smi(self, monkeypatch, capsys):
        FakeMachine(monkeypatch, bindings=False, smi=RuntimeError("nvidia-smi is not installed"))
        found, text = self.examined(capsys)
        assert "cuda-bindings is not installed" in found["backends"]["processes"]["reason"]
        assert found["links"]["why"] == "nvidia-smi is not installed"
        for fact in ("peers", "handles", "multicast"):
            assert found[fact]["why"] == "the package cuda-bindings is not installed"
        assert "offered: unknown: the package cuda-bindings is not installed" in text

    def test_a_gpu_that_nvidia_smi_does_not_list(self, monkeypatch, capsys):
        FakeMachine(monkeypatch, smi=SMI.replace("aaaa-1", "MIG"))
        assert "does not list GPU 1" in self.examined(capsys)[0]["links"]["why"]
