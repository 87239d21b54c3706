"""Tasks of lm-eval small enough to answer in seconds, with their data, as files."""

import json
import random
from pathlib import Path

from tests.support.small import WORDS

DATA = """
dataset_path: json
dataset_kwargs:
  data_files: {{test: {0}/rows.jsonl, train: {0}/shots.jsonl}}
  cache_dir: {0}/cache
test_split: test
fewshot_split: train
fewshot_config: {{sampler: default}}
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}} "
doc_to_target: " "
generation_kwargs: {until: [" the", "say"], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
""",
}
GROUP = "group: pair\ntask: [choices, texts]\naggregate_metric_list: []\n"


def write_tasks(directory: Path) -> Path:
    """A folder with the tasks, and the group `pair` of two of them."""
    directory.mkdir(parents=True)
    draw = random.Random(0)

    def say(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    for name, rows in (("rows", 6), ("shots", 4)):
        lines = []
        for _ in range(rows):
            choices = [f" {say(4)}" for _ in range(4)]
            row = {"question": say(12), "choices": choices, "answer": draw.randrange(4)}
            lines.append(json.dumps(row | {"text": say(250)}) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines))
    for name, text in TASKS.items():
        (directory / f"{name}.yaml").write_text(f"task: {name}{DATA.format(directory)}{text}")
    (directory / "pair.yaml").write_text(GROUP)
    return directory
