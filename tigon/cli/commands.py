"""Runs the commands of `tigon`; main.py parses their arguments."""

import sys
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from tigon.cli.chat import Chat, print_text, talk, talk_on_ranks
from tigon.cli.info import dtype_name
from tigon.cli.load import (
    load_model_and_tokenizer,
    load_tokenizer,
    on_ranks,
    parse_device,
    parse_dtype,
    parse_gguf_export,
    refuse_base,
)
from tigon.data import clean_cache
from tigon.eval import Perplexity, find_windows, parity, report, score
from tigon.generation.settings import SAMPLING, file_prefix, set_do_sample
from tigon.models import MODELS, CausalLM, from_pretrained
from tigon.models.config import eos_ids
from tigon.models.pretrained.convert import convert_pretrained
from tigon.models.pretrained.load import parse_gguf_path
from tigon.plan import format_plan, make_plan, read_job
from tigon.tokenizer import Tokenizer
from tigon.train import pack, preview
from tigon.train.data_commands import format_preview, has_color
from tigon.train.distributed import World
from tigon.train.export import (
    convert_checkpoint,
    export_merged,
    exported_directory,
    find_checkpoint,
    is_adapter,
)
from tigon.train.publish import push as push_folder
from tigon.utils.config import prefix_errors
from tigon.utils.terminal import one_line, raw_stream
from tigon.weights import Repository


@on_ranks
def generate(args: Namespace, world: World) -> int:
    """Runs `tigon generate`: prints the continuation of a prompt."""
    text = world.share(lambda: _read_prompt(args))
    with world.raise_on_all_ranks():
        model, tokenizer = load_model_and_tokenizer(args, world)
        ids = _encode_prompt(args, text, tokenizer)
        if not ids:
            raise ValueError("the prompt is empty")
        check_sequences(model)
        context = model.config.max_position_embeddings
        if len(ids) >= context:
            raise ValueError(f"the prompt has {len(ids)} tokens, for a context of {context}")
    assistant = None
    if args.assistant is not None:
        assistant = from_pretrained(args.assistant, dtype=parse_dtype(args), device=model.device)
    stream = tokenizer.decode_stream(skip_special_tokens=True)

    def show(new: torch.Tensor) -> None:
        world.progress.step += 1
        if world.main:
            print_text(stream.step(int(new)) or "")

    model.generate(
        torch.tensor([ids], device="cpu"),
        max_new_tokens=min(args.max_new_tokens, context - len(ids)),
        eos_token_id=end_tokens(model, tokenizer),
        tokenizer=tokenizer,
        streamer=show,
        assistant_model=assistant,
        cache_implementation=args.cache,
        **_sampling_settings(args),
        **({"stop_strings": args.stop} if args.stop else {}),
    )
    if world.main:
        print_text(f"{stream.finish()}\n")
    return 0


@on_ranks
def chat(args: Namespace, world: World) -> int:
    """Runs `tigon chat` until the user leaves."""
    with world.raise_on_all_ranks():
        model, tokenizer = load_model_and_tokenizer(args, world)
        check_sequences(model)
        settings = _sampling_settings(args) | {"eos_token_id": end_tokens(model, tokenizer)}
        sizes = {"system": args.system, "max_new_tokens": args.max_new_tokens}
        with prefix_errors(args.model, ValueError):
            conversation = Chat(model, tokenizer, **sizes, settings=settings)
    if world.size == 1:
        talk(conversation, args.model)
    else:
        talk_on_ranks(conversation, args.model, world)
    return 0


def _sampling_settings(args: Namespace) -> dict[str, Any]:
    """Returns the sampling options as arguments of model.generate; seeds torch without --seed."""
    names = (*SAMPLING, "repetition_penalty", "seed")
    if args.seed is None:
        torch.seed()  # otherwise every process draws the same tokens
    return set_do_sample({n: getattr(args, n) for n in names if getattr(args, n) is not None})


def plan(args: Namespace) -> int:
    """Runs `tigon plan`: prints the layouts that fit, the fastest first."""
    if args.most < 1:
        raise ValueError(f"--most {args.most} must be at least 1")
    job = read_job(args.model, args.gpus, args.gpu, args.seq_len, args.batch_tokens, args.settings)
    print(format_plan(make_plan(job, args.most)))
    return 0


def _read_prompt(args: Namespace) -> str:
    """Returns the prompt, for `-` from standard input; ValueError if it is not UTF-8."""
    try:
        text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
        (text + (args.system or "")).encode()  # some locales accept any byte
    except UnicodeError as error:
        position = getattr(error, "start", 0)
        raise ValueError(f"the prompt is not UTF-8 text (position {position})") from None
    return text


def _encode_prompt(args: Namespace, text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens of what a user says, by the chat template, or with --raw or without one of
    the text itself; ValueError for --system then."""
    if args.raw and args.system is not None:
        raise ValueError("--raw and --system: a raw text has no system message; give one of them")
    if args.raw or tokenizer.chat_template is None:
        if args.system is not None:
            raise ValueError(f"--system needs a chat template, and {args.model} has none")
        return tokenizer.encode(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = [*system, {"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert isinstance(ids, list)
    return ids


def check_sequences(model: CausalLM) -> None:
    """Raises ValueError if generation_config asks for several texts: a command writes one."""
    several = model.generation_config.get("num_return_sequences")
    if several not in (None, 1):
        raise ValueError(
            f"{file_prefix(model)}num_return_sequences={several}, and a "
            "command writes one text: set it to 1 there, or call generate in Python"
        )


def end_tokens(model: CausalLM, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that end a text: the model's, and the tokenizer's, which ends a turn."""
    ends = dict.fromkeys([*eos_ids(model.config, model.generation_config), tokenizer.eos_token_id])
    return [end for end in ends if end is not None and 0 <= end < model.config.vocab_size]


@on_ranks
def eval_perplexity(args: Namespace, world: World) -> int:
    """Runs `tigon eval perplexity`: prints the measures of all files and then of each."""
    with world.raise_on_all_ranks():
        model, tokenizer = load_model_and_tokenizer(args, world)
        if model.config.labels:
            raise ValueError(
                f"{args.model} is a reward model: it scores sequences and predicts no token, so it "
                "has no perplexity; give a language model (a run with task=reward says the "
                "accuracy on its eval_data)"
            )
        sizes = {"context": args.context, "stride": args.stride}
        windows = {file: find_windows(model, tokenizer, file, **sizes) for file in args.files}
    world.progress.step = 1
    result = Perplexity.join({file: score(model, found) for file, found in windows.items()})
    if world.main:
        print(_format_perplexity(result))
        for file, part in result.domains.items() if len(windows) > 1 else ():
            print(one_line(f"  {file}: {_format_perplexity(part)}"))
    return 0


def _format_perplexity(result: Perplexity) -> str:
    """Returns the line of `tigon eval perplexity` on some texts."""
    return (
        f"perplexity {result.perplexity:.4f}  loss {result.loss:.6f}  accuracy "
        f"{result.accuracy:.4f}  tokens {result.tokens}  bits/byte {result.bits_per_byte:.4f}"
    )


@on_ranks
def eval_tasks(args: Namespace, world: World) -> int:
    """Runs `tigon eval tasks`: prints lm-eval's tables, and with --out writes its results."""
    with world.raise_on_all_ranks():
        out = None if args.out is None else Path(args.out)
        if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
            raise ValueError(f"--out {args.out}: give a file, in a folder that there is")
        if out is not None:
            try:
                TemporaryFile(dir=out.absolute().parent).close()  # before hours of evaluation
            except OSError as error:
                raise ValueError(f"--out {args.out} cannot be written: {error.strerror}") from None
        from tigon.integrations import tasks  # needs an extra

        options = {"num_fewshot": args.num_fewshot, "limit": args.limit}
        tasks.check_options(**options)
        loaded = tasks.load_tasks([args.tasks], args.include_path)
        lm = tasks.TigonLM(*load_model_and_tokenizer(args, world))
    world.progress.step = 1
    options["apply_chat_template"] = args.apply_chat_template
    results = tasks.evaluate_tasks(lm, loaded, **options)
    if world.main:
        print(tasks.format_tables(results))
        if out is not None:
            tasks.write_results(out, results, {"pretrained": args.model} | options)
    return 0


def eval_parity(args: Namespace) -> int:
    """Runs `tigon eval parity`: prints its report; returns 1 if the model differs, else 0."""
    device, revision = parse_device(args.device), args.revision
    place: AbstractContextManager[str] = nullcontext(args.model)
    if (checkpoint := find_checkpoint(args.model)) or is_adapter(args.model, revision):
        place = exported_directory(args.model, revision, args.base)
        revision = revision if checkpoint else None
    else:
        refuse_base(args)
    with place as model:
        options = {"new_tokens": args.new_tokens, "layers": args.layers}
        result = parity(model, revision=revision, device=device, **options)
    print(report(result))
    return 1 if result.failures else 0


def export(args: Namespace) -> int:
    """Runs `tigon export`: writes a Hugging Face checkpoint, PEFT's of an adapter's run without
    --merge, or a GGUF file, and prints its path and dtype."""
    gguf = parse_gguf_export(args)  # checks the target, before anything is fetched
    dtype = "auto" if gguf else parse_dtype(args)
    options: dict[str, Any] = {"gguf": gguf, "stacked_experts": args.stack_experts}
    options["max_shard_size"] = args.max_shard_size
    if source := find_checkpoint(args.model):
        options |= {"merge": args.merge, "base": args.base}
        requested = None if dtype == "auto" else dtype
        dtype = convert_checkpoint(source, args.directory, dtype=requested, **options)
    elif args.merge:
        options["base"] = args.base
        dtype = export_merged(args.model, args.directory, args.revision, dtype, **options)
    else:
        if args.base is not None and is_adapter(args.model, args.revision):
            message = f"--base {args.base} needs --merge, which writes adapter and base as one"
            raise ValueError(message)
        refuse_base(args)
        place, options["gguf_file"] = parse_gguf_path(args.model)
        repository, tokenizer = Repository(place, revision=args.revision), load_tokenizer(args)
        dtype = convert_pretrained(
            repository, args.directory, MODELS, tokenizer=tokenizer, dtype=dtype, **options
        ).dtype
    name = dtype_name(dtype) if gguf in (None, "auto") else gguf
    print(one_line(f"{source or args.model} -> {args.directory}, {name}"))
    return 0


def push(args: Namespace) -> int:
    """Runs `tigon push`: uploads an export and prints its URL."""
    url = push_folder(
        Path(args.model),
        args.repository,
        private=args.private or None,
        revision=args.revision,
        message=args.message,
        create_pr=args.create_pr,
        overwrite_card=args.overwrite_card,
    )
    print(one_line(url))
    return 0


def data_show(args: Namespace) -> int:
    """Runs `tigon data show`: prints rows of data; returns 1 if a run would end at one, else 0."""
    config = args.config
    shown = preview(config, args.rows)
    output = raw_stream(sys.stdout)  # the colors are control characters; the text has none
    for line in format_preview(shown, config, color=has_color(output)):
        print(line, file=output)
    return int(config.bad_rows == "error" and any(row.error for row in shown.rows))


def data_pack(args: Namespace) -> int:
    """Runs `tigon data pack`: fills the data cache and prints what is in it."""
    pack(args.config)
    return 0


def data_clean(args: Namespace) -> int:
    """Runs `tigon data clean`: removes what the cache has not used for --days."""
    print(clean_cache(args.days))
    return 0
