"""Values that are expected of a type of machine, in data files that a site can add to.

A profile is a TOML file: ``[match]`` says which machines it is for, ``[expect]`` what they have.
What a file does not name is not compared.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from rdmakit.errors import InvalidArgument
from rdmakit.topology.model import Machine

__all__ = ["Expect", "Match", "Profile", "choose_profile", "load_profile", "shipped_profiles"]


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which machines a profile is for; all that is given must fit."""

    product: str | None = None
    """Pattern of the product's name (/sys/class/dmi/id/product_name): ``DGXH100*``."""
    gpu: str | None = None
    """Pattern of every GPU's name: ``NVIDIA H100 80GB HBM3*``."""
    gpus_least: int | None = None
    """Fewer GPUs are another machine, or a part of one."""

    @property
    def conditions(self) -> int:
        """Number of conditions: of several profiles that fit, the one with most counts."""
        return sum(value is not None for value in (self.product, self.gpu, self.gpus_least))

    def fits(self, machine: Machine, product: str) -> bool:
        """Return whether a machine is of this type."""
        names = [gpu.name for gpu in machine.gpus]
        if self.product is not None and not fnmatchcase(product, self.product):
            return False
        if self.gpu is not None and not (names and all(fnmatchcase(n, self.gpu) for n in names)):
            return False
        return self.gpus_least is None or len(names) >= self.gpus_least


class Expect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine of the type has; None: not compared."""

    gpus: int | None = None
    nvlinks: int | None = None
    """Active NVLinks of each GPU."""
    gpu_pcie: int | None = None
    """PCIe generation of the GPUs' links under load."""
    gpu_lanes: int | None = None
    rails: int | None = None
    """Ports of the compute fabric."""
    rate_gbps: float | None = None
    """Gb/s of each of them."""
    nic_pcie: int | None = None
    nic_lanes: int | None = None
    numa_nodes: int | None = None
    """NUMA nodes that have CPUs: a setting of the BIOS on some machines."""
    driver_least: str | None = None
    kernel_least: str | None = None
    open_modules: bool | None = None
    """Whether the NVIDIA kernel modules are the open ones."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expected values; empty where nothing is known of this type of machine."""

    name: str = ""
    match: Match = Match()
    expect: Expect = Expect()


def load_profile(path: Path) -> Profile:
    """Return the profile in a TOML file. Local.

    Raises:
        InvalidArgument: it cannot be read, is no TOML, or names a key or value that is not known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as exc:
        raise InvalidArgument(f"profile {path}: cannot be read: {exc}") from exc
    return _parse(text, str(path), path.stem)


def _parse(text: str, title: str, name: str) -> Profile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise InvalidArgument(f"profile {title}: no TOML: {exc}") from exc
    try:
        profile = msgspec.convert({"name": name, **values}, Profile)
    except msgspec.ValidationError as exc:
        known = "; ".join(
            f"{section}: {', '.join(kind.__struct_fields__)}"
            for section, kind in (("[match]", Match), ("[expect]", Expect))
        )
        raise InvalidArgument(f"profile {title}: {exc}. Known are name, {known}") from exc
    if profile.expect == Expect():
        raise InvalidArgument(f"profile {title}: [expect] has no value, so it expects nothing")
    return profile


@cache
def shipped_profiles() -> tuple[Profile, ...]:
    """Return the profiles that come with rdmakit, by name."""
    folder = files("rdmakit.doctor") / "profiles"
    found = [
        _parse(entry.read_text(encoding="utf-8"), entry.name, entry.name.removesuffix(".toml"))
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    ]
    return tuple(sorted(found, key=lambda profile: profile.name))


def choose_profile(machine: Machine, product: str = "", own: Sequence[Profile] = ()) -> Profile:
    """Return the profile for a machine; an empty one where none fits. Pure.

    Args:
        machine: what was found.
        product: the product's name as the firmware tells it.
        own: a site's profiles, which go before those that come with rdmakit.
    """
    for profiles in (own, shipped_profiles()):
        fitting = [
            profile
            for profile in profiles
            if profile.match.fits(machine, product.strip())
            and (profile.match.conditions or profiles is own)
        ]
        if fitting:
            return max(fitting, key=lambda profile: profile.match.conditions)
    return Profile()
