"""NVML beside /sys: what it knows better, and what is done without it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from rdmakit.drivers import nvml
from rdmakit.topology.explain import explain
from rdmakit.topology.facts import NvLink, NvmlFacts, NvmlGpu
from tests.unit import fake_machines as fakes
from tests.unit import topo_texts as texts
from tests.unit.topo_machines import found, survey

NVML = NvmlFacts(
    "550.54.15",
    "12.4",
    tuple(
        NvmlGpu(
            i,
            "NVIDIA H100 80GB HBM3",
            f"GPU-{i}",
            f"0000:{0x19 + 0x1A * i:02x}:00.0",
            i,
            nvlinks=(NvLink("switch"),) * 18,
            nvlink_version=4,
            generation=1,
            max_generation=5,
        )
        for i in range(3)
    ),
    ancestors=((None, "NODE", "NODE"),) * 3,
    p2p=(("X", "OK", "OK"), ("OK", "X", "OK"), ("OK", "OK", "X")),
)


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmakit.discovery.machine.have_pynvml", lambda: True)


@pytest.mark.usefixtures("with_nvml")
def test_nvml_knows_gpus_best(tmp_path: Path) -> None:
    fakes.hgx_h100(tmp_path)
    one = found(tmp_path, nvml=msgspec.json.encode(NVML).decode())
    assert len(one.gpus) == 3
    assert one.matrix.cell("GPU0", "GPU2") == "NV18"
    assert one.gpus[1].numa == 0
    assert one.nearest_nics("GPU1") == (2, ("mlx5_1",))
    assert any("5 of 8 GPUs" in note for note in one.notes)
    assert one.software["CUDA of the driver"] == "12.4"
    lines = " ".join(explain(one, survey(one).nodes[0].fabric, "GPU0", "GPU1"))
    assert "18 x 25 = 450 GB/s" in lines


@pytest.mark.usefixtures("with_nvml")
@pytest.mark.parametrize("answer", ["", "no json", '{"gpus": 7}', '{"problem": "NVML: gone"}'])
def test_bad_answers_of_nvml_fall_back_to_nvidia_smi(tmp_path: Path, answer: str) -> None:
    fakes.workstation(tmp_path)
    smi = texts.TABS.replace("\tNIC0\tNIC1", "").split("NIC0")[0].replace("\tPIX\tSYS", "")
    smi = smi.replace("\tSYS\tPXB", "")
    one = found(tmp_path, nvml=answer, **{"smi_topo_-m": smi})
    assert one.matrix.cell("GPU0", "GPU1") == "NV4"
    assert any("nvidia-smi is asked" in note for note in one.notes)


def test_nvml_driver_reads_what_the_library_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote:
        busId = b"FFFFFFFF:FF:FF.0"

    class Pci:
        busId = b"00000000:19:00.0"

    class Fake:
        """Stands for pynvml; what it lacks an old library lacks."""

        NVMLError = type("NVMLError", (Exception,), {})

        def nvmlInit(self) -> None: ...
        def nvmlShutdown(self) -> None: ...

        def __getattr__(self, name: str):
            table = {
                "nvmlDeviceGetCount": lambda: 1,
                "nvmlDeviceGetHandleByIndex": lambda i: "handle",
                "nvmlSystemGetDriverVersion": lambda: b"580.1",
                "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
                "nvmlDeviceGetName": lambda h: "NVIDIA H200",
                "nvmlDeviceGetUUID": lambda h: "GPU-1",
                "nvmlDeviceGetPciInfo": lambda h: Pci,
                "nvmlDeviceGetCpuAffinity": lambda h, n: [0x3, 0x1],
                "nvmlDeviceGetNvLinkState": lambda h, link: 1 if link < 2 else self.refuse(),
                "nvmlDeviceGetNvLinkRemoteDeviceType": lambda h, link: 2,
                "nvmlDeviceGetNvLinkRemotePciInfo": lambda h, link: Remote,
                "nvmlDeviceGetNvLinkVersion": lambda h, link: 6,
                "nvmlDeviceGetMigMode": lambda h: self.refuse(),
            }
            if name not in table:
                raise AttributeError(name)
            return table[name]

        def refuse(self) -> None:
            raise self.NVMLError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", Fake())
    monkeypatch.setattr(nvml, "have_pynvml", lambda: True)
    facts = nvml.read_nvml()
    assert (facts.driver, facts.cuda, facts.problem) == ("580.1", "13.0", "")
    (gpu,) = facts.gpus
    assert (gpu.pci, gpu.cpus, gpu.mig_mode) == ("0000:19:00.0", (0, 1, 64), None)
    assert gpu.nvlinks == (NvLink("switch"), NvLink("switch"))
    assert gpu.nvlink_version == 4
    assert nvml.decode_nvml(msgspec.json.encode(facts).decode()) == facts
