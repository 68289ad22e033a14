"""What a shared library of Linux imports, read from the file itself."""

from __future__ import annotations

from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile


def imported_symbols(library: Path) -> set[str]:
    """The names that the loader must find in other libraries."""
    with library.open("rb") as file:
        table = ELFFile(file).get_section_by_name(".dynsym")
        return {
            symbol.name
            for symbol in table.iter_symbols()
            if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name
        }


def dynamic_entries(library: Path, tag: str) -> list[str]:
    """The texts of the entries ``needed``, ``rpath`` or ``runpath`` of the dynamic section."""
    with library.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if isinstance(section, DynamicSection):
                wanted = f"DT_{tag.upper()}"
                return [getattr(t, tag) for t in section.iter_tags() if t.entry.d_tag == wanted]
    return []
