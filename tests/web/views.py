"""The views of the page, as its shell lists them."""

import re
from pathlib import Path

import service

PAGE = Path(service.__file__).parent / "web"
VIEWS = re.findall(r"\bname: \"(\w+)\",\s+label:", (PAGE / "page.js").read_text(encoding="utf-8"))
assert len(VIEWS) > 5
