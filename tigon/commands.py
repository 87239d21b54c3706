"""What the commands of `tigon` do; cli.py has their arguments."""

import os
import platform
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from tigon import __version__
from tigon.chat import Chat, put, talk
from tigon.data import clean_cache
from tigon.eval import parity, perplexity, report
from tigon.info import describe, dtype_name
from tigon.json_file import escaped
from tigon.kernels.attention import survey
from tigon.models import MODELS, CausalLM, build, convert, split_gguf
from tigon.parallel import MeshSizes, from_pretrained, take_part
from tigon.tokenizer import Tokenizer
from tigon.train import pack
from tigon.train.board import LAUNCHED, Failure
from tigon.train.board import report as report_failure
from tigon.train.export import as_directory, convert_checkpoint, find_checkpoint, load_checkpoint
from tigon.train.lora import settings_of
from tigon.train.parallel import World, start
from tigon.train.parallel_settings import Parallel
from tigon.train.plan import make_plan, read_job, show
from tigon.train.processes import run_ranks
from tigon.train.push import push as push_folder
from tigon.weights import Repository, check_free

CLOSED, INTERRUPTED = 141, 130  # exit codes, as in cli.py: of `| head`, and of Ctrl-C
SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def generate(args: Namespace) -> int:
    ranks = Parallel(tensor=args.tp) if args.tp > 1 else None
    try:
        _check_tp(args)
        if ranks is not None and "WORLD_SIZE" in os.environ:
            ranks.sizes(int(os.environ["WORLD_SIZE"]))
    except ValueError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 1  # every rank knows it: one of a host says it
        raise
    if ranks is None:
        return _generate(args, None)
    if "WORLD_SIZE" not in os.environ:
        return _on_ranks(args)
    with start(args.device or "auto", parallel=ranks) as world:
        return _as_rank(args, world)


def _as_rank(args: Namespace, world: World) -> int:
    """One of several ranks; one that fails tells the others, which end with it."""
    world.board.who = "tigon generate"
    try:
        return _generate(args, world)
    except (BrokenPipeError, KeyboardInterrupt) as error:
        world.board.fail("stopped", CLOSED if isinstance(error, OSError) else INTERRUPTED)
        raise
    except Exception as error:
        same = isinstance(error, ValueError)  # on all ranks: the first of them says it
        if not same and (other := world.board.failure()):  # what its end looks like from here
            world.board.say(other)
            return other.code
        text = str(error) if same else f"rank {world.rank}: {type(error).__name__}: {error}"
        report_failure(Failure(text))
        if world.board.fail(text) and not (same and LAUNCHED in os.environ):
            raise
        return 1


def _check_tp(args: Namespace) -> None:
    if args.tp < 1:
        raise ValueError(f"--tp {args.tp} must be at least 1")
    if args.tp == 1:
        return
    if args.assistant is not None:
        raise ValueError(f"--assistant is not there for --tp {args.tp}: leave one out")
    if found := find_checkpoint(args.model):
        how = "`tigon export --merge`" if settings_of(found) else "`tigon export`"
        raise ValueError(f"{args.model} is a checkpoint: {how} it first, for --tp")


def _on_ranks(args: Namespace) -> int:
    """The command on processes of this host."""
    gpus = torch.cuda.device_count()
    if args.tp > gpus and args.device != "cpu" and (gpus or args.device):
        raise ValueError(f"--tp {args.tp}, but torch sees {gpus} CUDA devices")
    # What is wrong with the model and its tokenizer is said before any process starts
    place, gguf_file = split_gguf(args.model)
    files = Repository(place, revision=args.revision)
    model, _ = build(files, MODELS, dtype=_dtype(args), gguf_file=gguf_file)
    take_part(model, MeshSizes(tensor=args.tp))
    _tokenizer(args)
    code, problem = run_ranks(args.tp, args.arguments_given, module="tigon.cli")
    # A pipe that is closed is no fault, and rank 0 has said why it ended
    if problem and code != CLOSED and not problem.startswith("rank 0 ended"):
        print(f"tigon generate: {problem}", file=sys.stderr)
    return code


def _generate(args: Namespace, world: World | None) -> int:
    """On this process, or as one of the ranks that share the model; the first one writes."""
    main = world is None or world.main
    together = nullcontext if world is None else world.together
    with together():
        text = _read(args) if main else ""
    if world is not None:
        (text,) = [found for found in world.board.gather(text) if found] or [""]
    with together():
        model, tokenizer = _load(args, world)
        ids = _prompt(args, text, tokenizer)
        if not ids:
            raise ValueError("the prompt is empty")
        context = model.config.max_position_embeddings
        if len(ids) >= context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but the model's context is {context}"
            )
    given = _sampling(args)
    if args.stop:
        given["stop_strings"] = args.stop
    assistant = None
    if args.assistant is not None:
        assistant = from_pretrained(args.assistant, dtype=_dtype(args), device=model.device)
    stream = tokenizer.decode_stream(skip_special_tokens=True)

    def show(new: torch.Tensor) -> None:
        if world is not None:
            world.board.step += 1  # the others say it, if this rank is killed
        if main:
            put(stream.step(int(new)) or "")

    model.generate(
        torch.tensor([ids]),
        max_new_tokens=min(args.max_new_tokens, context - len(ids)),
        eos_token_id=_ends(model, tokenizer),
        tokenizer=tokenizer,
        streamer=show,
        assistant_model=assistant,
        cache_implementation=args.cache,
        **given,
    )
    if main:
        put(f"{stream.finish()}\n")
    return 0


def chat(args: Namespace) -> int:
    model, tokenizer = _load(args)
    try:
        conversation = Chat(
            model,
            tokenizer,
            system=args.system,
            max_new_tokens=args.max_new_tokens,
            settings=_sampling(args) | {"eos_token_id": _ends(model, tokenizer)},
        )
    except ValueError as error:
        raise ValueError(f"{args.model}: {error}") from None
    talk(conversation, args.model)
    return 0


def _sampling(args: Namespace) -> dict[str, Any]:
    """Arguments of model.generate, of the options that were given."""
    given = {
        name: getattr(args, name)
        for name in (*SAMPLING, "repetition_penalty", "seed")
        if getattr(args, name) is not None
    }
    if args.temperature == 0:
        given |= {"do_sample": False, "temperature": None}
    elif any(name in given for name in SAMPLING):
        given["do_sample"] = True
    if args.seed is None:
        torch.seed()  # otherwise every process draws the same tokens
    return given


def plan(args: Namespace) -> int:
    job = read_job(args.model, args.gpus, args.gpu, args.seq_len, args.batch_tokens, args.settings)
    print(show(make_plan(job, args.most)))
    return 0


def data_pack(args: Namespace) -> int:
    pack(args.arguments)
    return 0


def data_clean(args: Namespace) -> int:
    print(clean_cache(args.days))
    return 0


def _read(args: Namespace) -> str:
    """The prompt; `-` reads it from standard input."""
    try:
        text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
        (text + (args.system or "")).encode()  # some locales accept any byte
    except UnicodeError as error:
        where = getattr(error, "start", 0)
        raise ValueError(f"the prompt is not UTF-8 text (position {where})") from None
    return text


def _prompt(args: Namespace, text: str, tokenizer: Tokenizer) -> list[int]:
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


def _ends(model: CausalLM, tokenizer: Tokenizer) -> list[int]:
    """Every token that ends a text: the model's own, and the tokenizer's, which ends a turn."""
    ends = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    own = tokenizer.eos_token_id
    ends = ends if own is None or own in ends else [*ends, own]
    return [end for end in ends if 0 <= end < model.config.vocab_size]


def eval_perplexity(args: Namespace) -> int:
    model, tokenizer = _load(args)
    result = perplexity(model, tokenizer, args.files, context=args.context, stride=args.stride)
    print(
        f"perplexity {result.perplexity:.4f}  loss {result.loss:.6f}  "
        f"accuracy {result.accuracy:.4f}  tokens {result.tokens}"
    )
    return 0


def eval_parity(args: Namespace) -> int:
    checkpoint, device = find_checkpoint(args.model), _device(args.device)
    with as_directory(checkpoint) if checkpoint else nullcontext(args.model) as model:
        result = parity(model, revision=args.revision, new_tokens=args.new_tokens, device=device)
    print(report(result))
    return 1 if result.failures else 0


def export(args: Namespace) -> int:
    dtype = _dtype(args)
    check_free(args.directory)  # before anything is fetched
    options = {"max_shard_size": args.max_shard_size, "stacked_experts": args.stack_experts}
    if source := find_checkpoint(args.model):
        own = None if dtype == "auto" else dtype
        options["merge"] = args.merge
        dtype = convert_checkpoint(source, args.directory, dtype=own, **options)
    elif args.merge:
        raise ValueError(f"--merge: {args.model} is no run with an adapter")
    else:
        place, options["gguf_file"] = split_gguf(args.model)
        repository, tokenizer = Repository(place, revision=args.revision), _tokenizer(args)
        dtype = convert(
            repository, args.directory, MODELS, tokenizer=tokenizer, dtype=dtype, **options
        ).dtype
    print(f"{source or args.model} -> {args.directory}, {dtype_name(dtype)}")
    return 0


def push(args: Namespace) -> int:
    where = push_folder(
        Path(args.model),
        args.repository,
        private=args.private or None,
        revision=args.revision,
        message=args.message,
        create_pr=args.create_pr,
        overwrite_card=args.overwrite_card,
    )
    print(where)
    return 0


def info(args: Namespace) -> int:
    if args.model is None:
        print(f"tigon {__version__}, python {platform.python_version()}, torch {torch.__version__}")
        print(f"cpu: {platform.machine()}, {torch.get_num_threads()} threads")
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            print(f"cuda:{i}: {device.name}, {device.total_memory / 2**30:.0f} GiB")
        where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        print(f"attention on {where}, bfloat16, heads of 128 dims:")
        for kind, choice in survey(where).items():
            print(f"  {kind:<20}{choice.name} ({choice.why})")
        return 0
    facts = describe(args.model, args.revision)
    print(args.model)
    for name, value in facts.items():
        print(f"  {name:<14}{escaped(value, 4000)}")
    return 0


def _load(args: Namespace, world: World | None = None) -> tuple[CausalLM, Tokenizer]:
    """`world`: of ranks that share the model."""
    if world is not None and world.meshes is not None:
        how: dict[str, Any] = {"dtype": _dtype(args), "revision": args.revision}
        mesh = world.meshes.tensor
        model = from_pretrained(args.model, device=world.device, mesh=mesh, **how)
        return model, _tokenizer(args)
    device = _device(args.device)
    if checkpoint := find_checkpoint(args.model):
        dtype = _dtype(args)
        return load_checkpoint(checkpoint, dtype=None if dtype == "auto" else dtype, device=device)
    tokenizer = _tokenizer(args)
    model = from_pretrained(args.model, revision=args.revision, dtype=_dtype(args), device=device)
    return model, tokenizer


def _tokenizer(args: Namespace) -> Tokenizer:
    """The model's; of a GGUF file, what its directory has."""
    place, gguf_file = split_gguf(args.model)
    if gguf_file is not None:
        directory = Repository(place, revision=args.revision)
        directory.file(gguf_file)  # raises if there is none
        if directory.optional_file("tokenizer.json") is None:
            raise FileNotFoundError(
                f"{args.model}: the tokenizer in a GGUF file is not read, and {place} has no "
                "tokenizer.json: put that of the original model there, as `hf download OWNER/NAME "
                f"tokenizer.json tokenizer_config.json --local-dir {place}` does"
            )
    return Tokenizer.from_pretrained(place, revision=args.revision)


def _dtype(args: Namespace) -> torch.dtype | Literal["auto"]:
    return "auto" if args.dtype == "auto" else getattr(torch, args.dtype)


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name
