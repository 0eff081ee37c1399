"""Writes one sheet as .xlsx (ECMA-376) with the standard library."""

import io
import re
import zipfile
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

MOST_LETTERS = 32_767  # in one cell; programs that read the format refuse more

# What XML 1.0 cannot hold, not even as a reference.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_SHEET_ML = "application/vnd.openxmlformats-officedocument.spreadsheetml"

_PARTS = {
    "[Content_Types].xml": (
        f'<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_SHEET_ML}.sheet.main+xml"/>'
        '<Override PartName="/xl/worksheets/sheet1.xml" '
        f'ContentType="{_SHEET_ML}.worksheet+xml"/>'
        "</Types>"
    ),
    "_rels/.rels": (
        f'<Relationships xmlns="{_PACKAGE}/relationships">'
        f'<Relationship Id="rId1" Type="{_OFFICE}/officeDocument" Target="xl/workbook.xml"/>'
        "</Relationships>"
    ),
    "xl/workbook.xml": (
        f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}">'
        '<sheets><sheet name="Sheet1" sheetId="1" r:id="rId1"/></sheets></workbook>'
    ),
    "xl/_rels/workbook.xml.rels": (
        f'<Relationships xmlns="{_PACKAGE}/relationships">'
        f'<Relationship Id="rId1" Type="{_OFFICE}/worksheet" Target="worksheets/sheet1.xml"/>'
        "</Relationships>"
    ),
}


def xlsx(rows: Iterable[Sequence[str | int | None]]) -> bytes:
    """A workbook whose only sheet has these rows.

    Characters that XML cannot hold are left out, and a text is cut at 32,767 characters.

    Args:
        rows: the cells of each row, at most 26, the names of the columns first. None is an empty
            cell.

    Returns:
        The content of an .xlsx file; equal rows give equal bytes.
    """
    lines = (f'<row r="{n}">{_cells(n, row)}</row>' for n, row in enumerate(rows, start=1))
    sheet = f'<worksheet xmlns="{_MAIN}"><sheetData>{"".join(lines)}</sheetData></worksheet>'
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in (_PARTS | {"xl/worksheets/sheet1.xml": sheet}).items():
            # A ZipInfo of its own has a fixed date.
            archive.writestr(zipfile.ZipInfo(name), _HEAD + text, zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _cells(number: int, row: Sequence[str | int | None]) -> str:
    """The cells of one row as XML."""
    return "".join(
        _cell(f"{chr(ord('A') + column)}{number}", value)
        for column, value in enumerate(row)
        if value is not None
    )


def _cell(place: str, value: str | int) -> str:
    """One cell as XML: a number, or a text that no reader takes for a formula."""
    if isinstance(value, int):
        return f'<c r="{place}"><v>{value}</v></c>'
    text = _NOT_XML.sub("", value)[:MOST_LETTERS]
    text = escape(text, {"\r": "&#13;"})  # a bare one would be read as a newline
    return f'<c r="{place}" t="inlineStr"><is><t xml:space="preserve">{text}</t></is></c>'
