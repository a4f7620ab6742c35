"""Five tasks with real text, in which drafts from earlier text (prompt lookup) help to different degrees.

An answer repeats much of its prompt in the first three tasks, and little in the last two.
"""

ARTICLE = """\
The ferry between Harrow Point and the island of Selkie stopped last Tuesday, after a crack was found in its hull. \
"We looked at the crack for an hour before anyone spoke," said Marta Lindqvist, who has been the captain for eleven \
years. The crack is forty centimetres long and lies just below the waterline. The shipyard in Dunmore expects the \
repair to take six weeks. "We cannot weld steel that old without cutting out the whole plate," said its manager, Owen \
Pryce.
About three hundred people live on Selkie. The school, the bakery and the clinic depend on the ferry for their \
supplies. A fishing boat now carries post and bread twice a week. "I have flour for nine days," said the baker, \
Ruth Amsel, "and after that we bake with whatever the sea brings us." The county has promised to hire a second boat, \
but its council will only vote on the money on Friday.
Older islanders remember the winter of 1987, when the ice closed the harbour for a month. "Nobody starved, and \
everybody learned to play cards," said Tom Rees, who is ninety-one. The mayor, Hanna Okafor, is less relaxed. "A \
community of three hundred people should not depend on one plate of steel," she said."""

CODE = """\
import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def total_by_customer(rows: list[dict[str, str]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        customer = row["customer"]
        totals[customer] = totals.get(customer, 0.0) + float(row["amount"])
    return totals


def write_totals(path: Path, totals: dict[str, float]) -> None:
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["customer", "total"])
        for customer, total in sorted(totals.items()):
            writer.writerow([customer, total])


def main() -> None:
    rows = read_rows(Path("orders.csv"))
    write_totals(Path("totals.csv"), total_by_customer(rows))"""

ORDERS = """\
Order 1041: Priya Nair, 14 Canal Street, Leeds, ordered 3 copper kettles on 2 May, 118.50 pounds, paid by card.
Order 1042: Joost van Dijk, 8 Molenweg, Utrecht, ordered 1 oak table on 3 May, 640.00 pounds, paid by transfer.
Order 1043: Amara Diallo, 77 Rue Basse, Lille, ordered 12 linen napkins on 3 May, 54.00 pounds, paid by card.
Order 1044: Kenji Mori, 5 Harbour Lane, Bristol, ordered 2 desk lamps on 5 May, 89.90 pounds, paid by invoice.
Order 1045: Lucia Romano, 31 Via Nuova, Turin, ordered 6 wine glasses on 6 May, 72.00 pounds, paid by card."""

TASKS = {
    "summary with quotations": "Summarize this article in five sentences. Quote at least three people word for word, "
    f"with their names.\n\n{ARTICLE}",
    "code edit": "Rename the function `total_by_customer` to `sum_by_customer` and repeat the whole program with this "
    f"change. Change nothing else.\n\n```python\n{CODE}\n```",
    "extraction to JSON": 'Write these orders as a JSON list. Each object has the keys "order", "name", "street", '
    f'"city", "item", "date", "amount" and "payment".\n\n{ORDERS}',
    "chat": "I have a free weekend and want to learn to bake bread. How should I begin, and what do I need?",
    "free story": "Write a story about a lighthouse keeper who finds a letter in a bottle.",
}
