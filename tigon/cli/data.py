"""The commands `tigon data ...`: those that read no model."""

import sys
from argparse import Namespace

from tigon.data import clean_cache
from tigon.train import pack, preview
from tigon.train.data_commands import format_preview, has_color, read_arguments
from tigon.utils.terminal import raw_stream


def data_show(args: Namespace) -> int:
    """1 if a run would end at one of the rows."""
    config = read_arguments(args.arguments)
    shown = preview(config, args.rows)
    output = raw_stream(sys.stdout)  # the colors are control characters; the text has none
    for line in format_preview(shown, config, color=has_color(output)):
        print(line, file=output)
    return int(config.bad_rows == "error" and any(row.error for row in shown.rows))


def data_pack(args: Namespace) -> int:
    pack(args.arguments)
    return 0


def data_clean(args: Namespace) -> int:
    print(clean_cache(args.days))
    return 0
