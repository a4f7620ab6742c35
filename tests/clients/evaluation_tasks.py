"""Small tasks for lm-evaluation-harness, made of our own sentences: multiple choice, perplexity and generation."""

import json
from pathlib import Path
from typing import Any

# All questions but one begin with this text, so that their prompts share cached blocks.
RULES = (
    "This is a quiz for children. Each line is a statement about the world, and each statement is true.\n"
    "A spider has eight legs.\nSnow is white.\n"
)
QUESTIONS: tuple[tuple[str, str, list[str]], ...] = (
    (RULES, "The capital of France is", [" Paris.", " London.", " Rome."]),
    (RULES, "Water is made of hydrogen and", [" oxygen", " iron and a little sand", " salt"]),
    (RULES, "A week has", [" seven days.", " nine days, and a half.", " days"]),
    (RULES, "When Mary and John went to the store, John gave a drink to", [" Mary", " John", " the naïve café owner"]),
    (RULES, "The opposite of hot is ", ["cold", "very hot", "a banana"]),  # the space moves to the choice
    (RULES, "2 + 2 =", [" 4", " 5", " 22"]),
    (RULES, "Birds can", [" fly", " fly fly fly fly", " 飛ぶ"]),
    (RULES, "The king of the jungle is the", [" lion", " mouse", " 🦁"]),
    (RULES, "", ["Fire is hot.", "Fire is cold."]),
    ("", "", ["Once upon a time", "Zx qq vv"]),  # no context at all: the prompt begins with the prefix token
)
TEXTS = (
    "The harbour was quiet. A single boat lay at the pier, and its owner sat on the wall and mended a net.",
    "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))  # 12",
    'A naïve café owner said: "Crème brûlée for 3 €, please!" 😀 Everyone laughed; nobody paid.',
    "On Monday it rained. On Tuesday it rained again. On Wednesday the rain stopped, but the river went on rising, and "
    "by Thursday the lower street was under water. People carried their chairs upstairs. On Friday a boy rowed a bath "
    "tub down the street and sold bread. On Saturday the sun came out, and the whole town smelled of mud. On Sunday "
    "nobody went to church, because the church was full of fish.",
    "x",
)
BEGINNINGS = (
    "Once upon a time, there was a",
    "The three primary colours are",
    "Question: What is the capital of France?\nAnswer:",
    "1, 2, 3, 4, 5, 6,",
    "The café on the corner sells",
    "Dear Sir or Madam,",
    RULES + "Grass is",
    RULES + "The moon is",
)
COMMON = {"dataset_path": "json", "test_split": "test"}
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "our_choices": (
        [{"question": rules + question, "choices": choices} for rules, question, choices in QUESTIONS],
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": 0,
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "our_texts": (
        [{"text": text} for text in TEXTS],
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    ),
    "our_continuations": (
        [{"beginning": beginning} for beginning in BEGINNINGS],
        {
            "output_type": "generate_until",
            "doc_to_text": "{{beginning}}",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n\n", " the"], "max_gen_toks": 16},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}


def write_tasks(directory: Path) -> None:
    """Write each task as the harness reads it: a YAML file (JSON is YAML), and its documents as JSON lines."""
    for name, (documents, task) in TASKS.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name} | COMMON | files | task), encoding="utf-8")
