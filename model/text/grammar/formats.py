"""Regular expressions for the formats of strings: those of JSON Schema 2020-12, and those that pydantic writes.

A format that is not here is an annotation, and has no effect. Each expression allows a part of what its standard
allows: texts that every usual reader of the format accepts. So there is no second 60, and no year 0.
"""

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_MONTH_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

_NUMBER = "[0-9]{1,3}"
_CLOCK = f"T({_NUMBER}H({_NUMBER}M({_NUMBER}S)?)?|{_NUMBER}M({_NUMBER}S)?|{_NUMBER}S)"
_DAYS = f"({_NUMBER}Y({_NUMBER}M({_NUMBER}D)?)?|{_NUMBER}M({_NUMBER}D)?|{_NUMBER}D)"
_DURATION = f"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_NUMBER}W)"

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9a-fA-F]{1,4}"
_SHORTENED = "|".join(f"({_GROUP}(:{_GROUP}){{0,{n - 1}}})?::({_GROUP}(:{_GROUP}){{0,{6 - n}}})?" for n in range(1, 7))
_IPV6 = f"(({_GROUP}:){{7}}{_GROUP}|{_SHORTENED})"

_LABEL = "[a-zA-Z0-9]{1,15}(-[a-zA-Z0-9]{1,15}){0,2}"
_DOMAIN = rf"({_LABEL}\.){{1,3}}[a-zA-Z]{{2,15}}"
_EMAIL = rf"[a-zA-Z0-9]{{1,15}}([._+-][a-zA-Z0-9]{{1,15}}){{0,2}}@{_DOMAIN}"
_CHARACTER = "([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-7][0-9a-fA-F])"
_AFTER_HOST = rf"(:[1-9][0-9]{{0,3}})?(/{_CHARACTER}*)*(\?({_CHARACTER}|[/?])*)?(#({_CHARACTER}|[/?])*)?"
HTTP_URL = f"https?://(localhost|{_DOMAIN}){_AFTER_HOST}"
_URI = rf"({HTTP_URL}|[a-z][a-z0-9+.-]{{1,15}}://{_DOMAIN}{_AFTER_HOST}|(urn|mailto|tel|data):{_CHARACTER}+)"
_HEX = "[0-9a-fA-F]"
_BASE64 = "([A-Za-z0-9{0}]{{4}})*([A-Za-z0-9{0}][AQgw]==|[A-Za-z0-9{0}]{{2}}[AEIMQUYcgkosw048]=)?"
_IPV4_NETWORK = rf"({_BYTE}(\.0){{3}}/8|{_BYTE}\.{_BYTE}(\.0){{2}}/16|({_BYTE}\.){{3}}0/24|{_IPV4}/32|0\.0\.0\.0/0)"
_IPV6_NETWORK = f"(({_GROUP}:){{2}}:/32|({_GROUP}:){{3}}:/48|({_GROUP}:){{4}}:/64|{_IPV6}/128|::/0)"


def _uuid(version: str) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": _DURATION,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "name-email": f"[a-zA-Z]{{1,15}}( [a-zA-Z]{{1,15}}){{0,3}} <{_EMAIL}>",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "idn-hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "uuid": _uuid("[1-8]"),
    **{f"uuid{version}": _uuid(str(version)) for version in range(1, 9)},
    "json-pointer": "(/([^/~]|~[01])*)*",
    "relative-json-pointer": "(0|[1-9][0-9]{0,3})(#|(/([^/~]|~[01])*)*)",
    "ipvanyaddress": f"({_IPV4}|{_IPV6})",
    "ipv4interface": f"{_IPV4}/([12]?[0-9]|3[0-2])",
    "ipv6interface": f"{_IPV6}/([1-9]?[0-9]|1[01][0-9]|12[0-8])",
    "ipvanyinterface": f"({_IPV4}/([12]?[0-9]|3[0-2])|{_IPV6}/([1-9]?[0-9]|1[01][0-9]|12[0-8]))",
    "ipv4network": _IPV4_NETWORK,
    "ipv6network": _IPV6_NETWORK,
    "ipvanynetwork": f"({_IPV4_NETWORK}|{_IPV6_NETWORK})",
    "base64": _BASE64.format("+/"),
    "base64url": _BASE64.format("_-"),
}
