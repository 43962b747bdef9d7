"""kernel_image.py VMLINUZ OUTPUT: the kernel's ELF image out of its compressed file.

QEMU starts that directly; under emulation its decompression alone would take seconds. A kernel
that is not packed by xz is kept as it is, which starts as well.
"""

import lzma
import shutil
import sys
from pathlib import Path

XZ = b"\xfd7zXZ\x00"
ELF = b"\x7fELF"


def image(packed: bytes) -> bytes:
    start = packed.find(XZ)
    while start >= 0:
        try:
            found = lzma.LZMADecompressor().decompress(packed[start:])
        except lzma.LZMAError:
            found = b""
        if found.startswith(ELF):
            return found
        start = packed.find(XZ, start + 1)
    return b""


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    found = image(source.read_bytes())
    if found:
        target.write_bytes(found)
    else:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
