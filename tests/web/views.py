"""The views of the page, as its shell lists them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "service" / "web"
VIEWS = re.findall(r"\bname: \"(\w+)\",\s+label:", (PAGE / "page.js").read_text(encoding="utf-8"))
assert len(VIEWS) > 5
