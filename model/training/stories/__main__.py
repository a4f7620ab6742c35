"""Write stories to a file, for `model.training.train`.

python -m model.training.stories --texts 100000 --out stories.txt
"""

from itertools import islice
from pathlib import Path

from model.command_line import Parser, number
from model.text.corpus import END_OF_TEXT
from model.training.stories.corpus import texts


def main() -> None:
    parser = Parser(prog="python -m model.training.stories", description="Write simple stories to train on.")
    parser.add_argument("--texts", type=number(int, 1), default=100_000, help="number of texts (default: %(default)s)")
    parser.add_argument("--seed", type=number(int), default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    try:
        with options.out.open("w", encoding="utf-8") as file:
            file.writelines(f"{text}\n{END_OF_TEXT}" for text in islice(texts(options.seed), options.texts))
    except OSError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
