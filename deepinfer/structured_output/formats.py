"""String formats as regular expressions that are at least as strict as their definitions."""

from __future__ import annotations

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # 0000 is no year
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"

_N = "[0-9]{1,4}"
_CLOCK_SPAN = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DATE_SPAN = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"

_ALNUM = "[A-Za-z0-9]"
_LABEL = f"{_ALNUM}{{1,15}}(-{_ALNUM}{{1,15}}){{0,3}}"  # three labels stay within 191 characters
_ATOM = "[A-Za-z0-9_%+-]{1,20}"  # three of them stay within 64 characters

_ESCAPED = f"%{_HEX}{{2}}"
_NAME = rf"([A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})"
_PATH = rf"([A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_QUERY = rf"([A-Za-z0-9._~!$&'()*+,;=:@/?-]|{_ESCAPED})"


def _ipv6() -> str:
    """Eight groups, or up to seven with one gap."""
    forms = [f"({_GROUP}:){{7}}{_GROUP}"]
    for before in range(8):
        head = f"{_GROUP}(:{_GROUP}){{{before - 1}}}" if before else ""
        after = 7 - before
        tail = f"({_GROUP}(:{_GROUP}){{0,{after - 1}}})?" if after else ""
        forms.append(f"{head}::{tail}")
    return f"({'|'.join(forms)})"


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DATE_SPAN}({_CLOCK_SPAN})?|{_CLOCK_SPAN}|{_N}W)",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _ipv6(),
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,2}}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(//(({_NAME}|:)*@)?{_NAME}*(:[0-9]*)?(/{_PATH}*)*"
        rf"|/({_PATH}+(/{_PATH}*)*)?|{_PATH}+(/{_PATH}*)*|)(\?{_QUERY}*)?(#{_QUERY}*)?"
    ),
}
"""Format -> expression for the whole string. "hostname" has up to three labels of up to four runs of up to 15
letters and digits; "email" up to three atoms of up to 20 characters at two or three such labels; "uri" is all
but IP literals; "duration" has numbers of up to four digits, "time" and "date-time" upper-case T and Z."""

NUMBER_FORMATS = {"int32": 2**31, "int64": 2**63, "float": None, "double": None}
"""OpenAPI's formats of numbers -> numbers go from minus this to this minus one; None: no further meaning."""
