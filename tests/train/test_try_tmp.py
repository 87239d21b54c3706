from tests.train.ranks import Ranks
from tigon.train import main


def test_x(workspace, capsys):
    for i, more in enumerate(
        (
            {"parallel.tensor": 4},
            {"parallel.context": 4},
            {"parallel.expert": 4},
            {"optimizer": "nope"},
            {"data": "nowhere.jsonl"},
            {"model": "/nowhere"},
            {"parallel.tensor": 3},
            {"lora.rank": 400},
            {"fp8": "true"},
            {"batch_size": 3},
            {"parallel.tensor": 2, "lora.rank": 4, "lora.targets": "[lm_head]"},
        )
    ):
        r = Ranks(4, main, workspace.settings(f"r{i}", **({"batch_size": 4} | more)))
        try:
            r.finish()
        except AssertionError as e:
            print(more, "\n ---", e)
