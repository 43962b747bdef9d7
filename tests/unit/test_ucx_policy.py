"""decide() over invented machines: every branch, no UCX needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rdmakit.config import UCX_POLICIES
from rdmakit.drivers.ucx_policy import (
    CORE,
    CUDA_MODULES,
    IB_MODULES,
    Decision,
    MpiFacts,
    UcxFacts,
    UcxFiles,
    decide,
    version_tuple,
)


def ucx(
    directory: str, version: str = "1.20.1", modules: tuple[str, ...] = (), error: str = ""
) -> UcxFiles:
    return UcxFiles(
        tuple((name, f"{directory}/{name}.so.0") for name in CORE),
        tuple((name, f"{directory}/ucx/{name}.so.0") for name in modules),
        version,
        error,
    )


def mapped(files: UcxFiles) -> dict[str, Any]:
    return {
        "mapped": tuple((name, (path,)) for name, path in files.libraries),
        "mapped_ucx": files,
    }


MPI_UCX = ucx("/v/lib/openmpi", modules=IB_MODULES)
WHEEL = ucx("/v/libucx/lib", modules=CUDA_MODULES[:2])
SYSTEM = ucx("/usr/lib", modules=(*IB_MODULES[:2], *CUDA_MODULES[:2]))
MPI_WHEEL = MpiFacts("/v/lib/libmpi.so.40", True, "openmpi 5.0.11", "libmpi needs ucp", MPI_UCX)
OLD = ucx("/usr/lib", "1.13.1")
DEBIAN = MpiFacts("/usr/lib/libmpi.so.40", True, "", "mca_pml_ucx.so needs libucp.so.0", OLD)
BASE = UcxFacts(wheel=WHEEL, wheel_package="libucx-cu12 1.20.1", ucxx=("ucxx-cu12 0.52.0",))


def refused(decision: Decision, kind: str, *words: str) -> None:
    assert decision.error_kind == kind
    assert (decision.source, decision.open, decision.modules) == ("", (), ())
    for word in words:
        assert word in decision.error


def opened(decision: Decision) -> list[str]:
    assert decision.error == ""
    return [module.path for module in decision.modules if not module.skip]


def test_version_tuple() -> None:
    assert version_tuple("1.20.1") == (1, 20, 1)
    assert version_tuple("1.21.0-rc1") == (1, 21, 0)
    assert version_tuple("") == version_tuple("unknown") == ()


def test_none_is_refused_before_anything_else() -> None:
    twice = replace(BASE, mapped=(("libucs", ("/a/libucs.so.0", "/b/libucs.so")),), ucxx=())
    refused(decide(twice, "none"), "unavailable", "RDMAKIT_UCX=none", "MPI channel")


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("policy", [p for p in UCX_POLICIES if p != "none"])
def test_two_files_of_one_library(name: str, policy: str) -> None:
    facts = replace(BASE, mapped=((name, ("/a/x.so.0", "/b/x.so")),), mapped_ucx=MPI_UCX)
    refused(decide(facts, policy), "setup", name, "/a/x.so.0 and /b/x.so", "import ucxx")


def test_two_files_of_a_module_are_not_ours_to_refuse() -> None:
    facts = replace(BASE, **mapped(WHEEL))
    facts = replace(facts, mapped=(*facts.mapped, ("libuct_ib", ("/a/i.so.0", "/b/i.so"))))
    assert decide(facts, "auto").source == "mapped-wheel"


def test_both_ucxx_packages() -> None:
    facts = replace(BASE, ucxx=("ucxx-cu12 0.52.0", "ucxx-cu13 0.52.0"))
    cure = "pip uninstall ucxx-cu12 ucxx-cu13 libucxx-cu12 libucxx-cu13"
    refused(decide(facts, "auto"), "unavailable", cure)


def test_no_ucxx() -> None:
    refused(
        decide(replace(BASE, ucxx=()), "auto"),
        "unavailable",
        "pip install 'rdmakit[cpu]'",
        "rdmakit[cuda12]",
        "rdmakit[cuda13]",
    )


@pytest.mark.parametrize("policy", ["auto", "mpi"])
def test_mapped_by_the_mpi_wheel(policy: str) -> None:
    decision = decide(replace(BASE, mpi=MPI_WHEEL, **mapped(MPI_UCX)), policy)
    assert (decision.source, decision.open) == ("mapped-mpi", ())
    own = [path for _, path in MPI_UCX.modules]
    assert opened(decision) == own + [path for _, path in WHEEL.modules]
    assert "openmpi 5.0.11" in decision.reason
    assert decision.warnings == ()


@pytest.mark.parametrize("policy", ["auto", "wheel"])
def test_mapped_by_libucx_takes_ib_of_the_mpi_wheel(policy: str) -> None:
    coming = replace(MPI_WHEEL, mapped=False)
    decision = decide(replace(BASE, mpi=coming, **mapped(WHEEL)), policy)
    assert decision.source == "mapped-wheel"
    assert opened(decision) == [path for _, path in (*WHEEL.modules, *MPI_UCX.modules)]


def test_modules_of_another_release_are_named_and_not_opened() -> None:
    newer = ucx("/v/libucx/lib", "1.21.0", CUDA_MODULES[:2])
    facts = replace(BASE, mpi=MPI_WHEEL, wheel=newer, wheel_package="libucx-cu12 1.21.0")
    on_mpi = decide(replace(facts, **mapped(MPI_UCX)), "auto")
    assert not set(opened(on_mpi)) & {path for _, path in newer.modules}
    on_wheel = decide(replace(facts, **mapped(newer)), "auto")
    assert opened(on_wheel) == [path for _, path in newer.modules]
    for decision in (on_mpi, on_wheel):
        skipped = [module.skip for module in decision.modules if module.skip]
        assert skipped
        assert all("1.21.0" in text and "1.20.1" in text for text in skipped)
        assert len(decision.warnings) == 1


def test_modules_of_unknown_release_are_not_opened() -> None:
    unknown = replace(MPI_UCX, version="", error="no answer")
    facts = replace(BASE, mpi=replace(MPI_WHEEL, ucx=unknown), **mapped(WHEEL))
    decision = decide(facts, "auto")
    assert [m.name for m in decision.modules if "no answer" in m.skip] == list(IB_MODULES)


def test_ib_modules_are_borrowed_from_wheels_only() -> None:
    mpi = MpiFacts("/opt/libmpi.so.40", True, "", "needs", ucx("/opt/ucx", modules=IB_MODULES))
    decision = decide(replace(BASE, mpi=mpi, **mapped(WHEEL)), "auto")
    assert [m.name for m in decision.modules] == list(CUDA_MODULES[:2])


def test_a_mapped_module_is_named_by_its_file() -> None:
    facts = replace(BASE, mpi=MPI_WHEEL, **mapped(WHEEL))
    facts = replace(facts, mapped=(*facts.mapped, ("libuct_cuda", ("/x/libuct_cuda.so",))))
    assert "/x/libuct_cuda.so" in opened(decide(facts, "auto"))


@pytest.mark.parametrize(
    ("files", "policy"),
    [(WHEEL, "mpi"), (MPI_UCX, "wheel"), (MPI_UCX, "system"), (SYSTEM, "mpi"), (SYSTEM, "wheel")],
)
def test_policy_against_what_is_mapped(files: UcxFiles, policy: str) -> None:
    facts = replace(BASE, mpi=MPI_WHEEL, **mapped(files))
    refused(decide(facts, policy), "setup", f"RDMAKIT_UCX={policy}", files.directory)


def test_mapped_system_ucx() -> None:
    decision = decide(replace(BASE, system=SYSTEM, **mapped(SYSTEM)), "system")
    assert decision.source == "mapped-system"
    mpi = MpiFacts("/usr/lib/libmpi.so.40", True, "", "needs", SYSTEM)
    both = decide(replace(BASE, system=SYSTEM, mpi=mpi, **mapped(SYSTEM)), "system")
    assert both.source == "mapped-mpi"


def test_mapped_but_too_old() -> None:
    refused(
        decide(replace(BASE, mpi=DEBIAN, **mapped(OLD)), "auto"),
        "unavailable",
        "/usr/lib/libmpi.so.40 (Open MPI, not a PyPI wheel)",
        "UCX 1.13.1",
        "1.19 or newer",
        "MPI channel serves",
        "rdmakit[openmpi]",
    )
    refused(decide(replace(BASE, **mapped(OLD)), "auto"), "unavailable", "UCX 1.13.1", "LD_PRELOAD")
    old_wheel = replace(MPI_WHEEL, ucx=replace(MPI_UCX, version="1.18.0"))
    facts = replace(BASE, mpi=old_wheel, **mapped(replace(MPI_UCX, version="1.18.0")))
    refused(decide(facts, "auto"), "unavailable", "pip install -U openmpi")


def test_ucxx_before_a_foreign_mpi_is_used_with_a_warning() -> None:
    decision = decide(replace(BASE, mpi=DEBIAN, **mapped(WHEEL)), "auto")
    assert decision.source == "mapped-wheel"
    assert "under /usr/lib/libmpi.so.40" in decision.warnings[0]


def test_partly_mapped_is_completed_in_order() -> None:
    facts = replace(BASE, mapped=(("libucs", ("/v/libucx/lib/libucs.so.0",)),), mapped_ucx=WHEEL)
    assert decide(facts, "auto").open == tuple(path for _, path in WHEEL.libraries[1:])


def test_incomplete_ucx() -> None:
    broken = replace(WHEEL, libraries=WHEEL.libraries[:1] + WHEEL.libraries[3:])
    refused(decide(replace(BASE, wheel=broken), "auto"), "unavailable", "libucm, libuct")


@pytest.mark.parametrize("policy", ["auto", "mpi"])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_nothing_mapped_takes_what_mpi_brings(policy: str, is_mapped: bool) -> None:
    mpi = replace(MPI_WHEEL, mapped=is_mapped)
    decision = decide(replace(BASE, mpi=mpi, system=SYSTEM), policy)
    assert decision.source == "mpi"
    assert decision.open == tuple(path for _, path in MPI_UCX.libraries)


def test_foreign_mpi_with_a_fitting_ucx_keeps_it() -> None:
    site = ucx("/opt/ucx/lib", "1.19.0", IB_MODULES)
    mpi = MpiFacts("/opt/mpi/libmpi.so.40", True, "", "mca_pml_ucx.so needs libucp.so.0", site)
    decision = decide(replace(BASE, mpi=mpi), "auto")
    assert (decision.source, decision.version) == ("mpi", "1.19.0")
    assert all(m.skip for m in decision.modules if m.name in CUDA_MODULES)


@pytest.mark.parametrize("policy", ["auto", "mpi", "wheel", "system"])
def test_never_another_ucx_under_a_foreign_mpi(policy: str) -> None:
    facts = replace(BASE, mpi=DEBIAN, system=ucx("/opt/ucx"))
    refused(
        decide(facts, policy),
        "unavailable",
        "/usr/lib/libmpi.so.40",
        "UCX 1.13.1",
        "mca_pml_ucx.so",
        "MPI channel serves",
        "rdmakit[mpich]",
    )


@pytest.mark.parametrize("policy", ["auto", "wheel"])
def test_foreign_mpi_whose_ucx_is_not_found_or_silent(policy: str) -> None:
    refused(decide(replace(BASE, mpi=replace(DEBIAN, ucx=None)), policy), "unavailable", "found")
    silent = replace(DEBIAN, ucx=replace(OLD, version="", error="rc 1"))
    refused(decide(replace(BASE, mpi=silent), policy), "unavailable", "unknown release (rc 1)")


def test_system_policy_may_take_the_ucx_of_a_foreign_mpi() -> None:
    mpi = MpiFacts("/usr/lib/libmpi.so.40", True, "", "needs", SYSTEM)
    assert decide(replace(BASE, mpi=mpi, system=SYSTEM), "system").source == "system"


@pytest.mark.parametrize("policy", ["auto", "wheel"])
def test_foreign_mpi_without_ucx_takes_the_wheel(policy: str) -> None:
    mpi = MpiFacts("/usr/lib/libmpi.so.12", True)
    assert decide(replace(BASE, mpi=mpi), policy).source == "wheel"
    refused(decide(replace(BASE, mpi=mpi), "mpi"), "unavailable", "brings no UCX", "MPICH")


def test_old_mpi_wheel_not_mapped_gives_way_to_libucx() -> None:
    old = replace(MPI_WHEEL, ucx=replace(MPI_UCX, version="1.18.0"))
    decision = decide(replace(BASE, mpi=old), "auto")
    assert decision.source == "wheel"
    assert "1.18.0" in decision.warnings[0]
    assert all(m.skip for m in decision.modules if m.name in IB_MODULES)
    refused(decide(replace(BASE, mpi=old), "mpi"), "unavailable", "pip install -U openmpi")


def test_without_mpi() -> None:
    assert decide(BASE, "auto").source == "wheel"
    refused(decide(BASE, "mpi"), "unavailable", "no MPI library was found")


def test_system_before_wheel_only_when_complete() -> None:
    assert decide(replace(BASE, system=SYSTEM), "auto").source == "system"
    for modules in ((), IB_MODULES, CUDA_MODULES):
        facts = replace(BASE, system=ucx("/usr/lib", modules=modules))
        assert decide(facts, "auto").source == "wheel"
        assert decide(facts, "system").source == "system"
        assert decide(replace(facts, wheel=None), "auto").source == "system"


@pytest.mark.parametrize("policy", ["auto", "wheel", "system"])
def test_nothing_usable(policy: str) -> None:
    facts = replace(BASE, wheel=ucx("/w", "1.15.0"), system=ucx("/s", "1.18.1"))
    decision = decide(facts, policy)
    refused(decision, "unavailable", f"RDMAKIT_UCX={policy}", "1.19", "MPI channel serves")
    assert ("1.15.0" in decision.error) == (policy != "system")
    assert ("1.18.1" in decision.error) == (policy != "wheel")


def test_environment_written_by_an_earlier_import_is_warned_of() -> None:
    facts = replace(BASE, foreign_environment=("UCX_MAX_RNDV_RAILS=1",), **mapped(WHEEL))
    assert "UCX_MAX_RNDV_RAILS=1" in decide(facts, "auto").warnings[0]
