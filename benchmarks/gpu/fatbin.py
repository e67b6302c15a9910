"""Clears CUDA device code of other architectures in a shared library, so that it compresses to a fraction.

The ELF section `.nv_fatbin` is a sequence of containers. A container has a header (u32 magic, u16 version, u16 header size,
u64 size of what follows) and one entry per architecture: u16 kind (1 PTX, 2 machine code), u16, u32 header size, u64 size of
the code, u32, u32, u16, u16, u32 architecture. The driver chooses an entry by its header alone. Code is cleared in place:
sizes, offsets and headers stay, so every symbol of the library stays valid.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Cleared", "clear_other_architectures"]

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MACHINE_CODE = 2


@dataclass(frozen=True, slots=True)
class Cleared:
    """Bytes of device code in a library."""

    kept: int
    cleared: int
    without: int
    """Containers without machine code for the architecture: their kernels fail to load on it."""


def clear_other_architectures(library: bytearray, architecture: int) -> Cleared:
    """Sets all device code to zero but machine code for `architecture` (90: sm_90). Raises ValueError if a header is wrong."""
    kept = cleared = without = 0
    for start, end in _fatbins(library):
        for entries in _containers(library, start, end):
            wanted = [(kind, arch) == (_MACHINE_CODE, architecture) for kind, arch, _, _ in entries]
            without += not any(wanted)
            for is_wanted, (_, _, offset, size) in zip(wanted, entries, strict=True):
                if is_wanted:
                    kept += size
                else:
                    cleared += size
                    library[offset : offset + size] = bytes(size)
    return Cleared(kept, cleared, without)


def _fatbins(library: bytearray) -> Iterator[tuple[int, int]]:
    """The byte ranges of the sections `.nv_fatbin` of a 64-bit little-endian ELF file."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", library, 0x3A)
    sections = [_SECTION.unpack_from(library, table + size * index) for index in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, length, *_ in sections:
        first = names + name
        if library[first : library.index(0, first)] == b".nv_fatbin":
            yield offset, offset + length


def _containers(library: bytearray, start: int, end: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """For each container its entries: kind, architecture, offset and size of the code."""
    at = start
    while at < end:
        if not any(library[at : at + 8]):  # padding between containers
            at += 8
            continue
        magic, _, header, length = _CONTAINER.unpack_from(library, at)
        if magic != _MAGIC:
            raise ValueError(f"no fatbin container at byte {at}: found {magic:#x}")
        entry, last = at + header, at + header + length
        entries = []
        while entry < last:
            kind, _, entry_header, size, _, _, _, _, architecture = _ENTRY.unpack_from(library, entry)
            entries.append((kind, architecture, entry + entry_header, size))
            entry += entry_header + size
        if entry != last or last > end:
            raise ValueError(f"the entries of the fatbin container at byte {at} do not fill it")
        yield entries
        at = last
