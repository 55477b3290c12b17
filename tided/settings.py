"""A profile as frozen typed settings. Each field says what it affects:

- `numbers`: changes what is computed, or whether a collective happens. In the boot guard by construction.
- `node`:    belongs to this node or rank (paths, addresses, sizes of local buffers). May differ between ranks.
- `policy`:  decided by rank 0 alone (limits, texts, names). Other ranks never act on it.

A field with `built=False` is part of the profile format, but nothing in this build reads it: a start with a value other
than its default is refused, naming the line (`tided.profile.load_for_start`).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MOST_TOKENS = 1 << 24
MOST_SLOTS = 1 << 20
MOST_RANKS = 64
MOST_BYTES = 1 << 50  # no number of a profile is larger: what is computed from them fits 64 bits


def _doc(
    affects: Literal["numbers", "node", "policy"], text: str, built: bool = True, path: bool = False, **limits: Any
) -> Meta:
    """`path`: the value names a file; `tided.profile` resolves it against the profile's own directory."""
    if limits.keys() & {"ge", "gt"}:
        limits.setdefault("le", MOST_BYTES)
    return Meta(description=text, extra={"affects": affects, "built": built, "path": path}, **limits)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Model(Section, frozen=True):
    path: Annotated[
        str,
        _doc(
            "node", "Directory of the checkpoint (config.json, *.safetensors, tokenizer.json).", path=True, min_length=1
        ),
    ]
    served_name: Annotated[str, _doc("policy", "Name that clients see.", min_length=1)]
    numerics: Annotated[
        Literal["native", "fp32"],
        _doc("numbers", "native: the rounding of activations and caches that the model was made for; fp32: none."),
    ] = "native"
    prefill_chunk_tokens: Annotated[int, _doc("numbers", "Tokens of a prompt computed in one step.", ge=1, le=8192)] = (
        512
    )
    decoder_replay: Annotated[
        Literal["full", "bounded"],
        _doc(
            "numbers",
            "bounded: layers after the last KV source run over the last window of a chunk only (approximate).",
        ),
    ] = "full"
    dense: Annotated[
        str,
        _doc(
            "node",
            "Directory of another checkpoint of the same model, for all weights but the routed experts; empty: none.",
            path=True,
        ),
    ] = ""
    overlay: Annotated[
        str,
        _doc("node", "Safetensors file of edited weights that stand in place of the checkpoint's own.", path=True),
    ] = ""
    ablation: Annotated[
        str,
        _doc("node", "File of directions that are projected out of what layers add to the residual stream.", path=True),
    ] = ""
    engram_cache_bytes: Annotated[
        int, _doc("node", "Memory for Engram rows read from the checkpoint.", ge=0, le=MOST_BYTES)
    ] = 64 << 20


class Experts(Section, frozen=True):
    resident: Annotated[int, _doc("numbers", "Routed experts kept in memory, over all layers.", ge=1, le=MOST_SLOTS)]
    spare_slots: Annotated[
        int, _doc("numbers", "Slots beside the residents into which swaps are read.", ge=1, le=MOST_SLOTS)
    ] = 32
    verify_reads: Annotated[bool, _doc("node", "Check each record read from a pack against its checksum.")] = False
    source: Annotated[Literal["checkpoint", "pack"], _doc("node", "Where expert records are read from.")] = "checkpoint"
    pack_dir: Annotated[str, _doc("node", "Directory of the packs that `tidectl pack` writes.", path=True)] = ""
    read_threads: Annotated[
        int, _doc("node", "Most expert reads in flight; a start measures how many the disk gains from.", ge=1, le=256)
    ] = 4


class Tide(Section, frozen=True):
    sensitivity: Annotated[
        Literal["off", "low", "medium", "high", "max"] | Annotated[float, Meta(ge=0, lt=0.5)],
        _doc(
            "policy",
            "How fast the resident set follows new traffic: half-life of 40, 20, 10 or 5 requests; or the newest "
            'request\'s share of all votes, "high" is 0.067. Off: no plans and no aging; a ring still exchanges '
            "residents for what it read.",
        ),
    ] = "high"
    prior_votes: Annotated[
        float, _doc("policy", "Weight of the seed against observed requests.", ge=0, le=1_000_000)
    ] = 4.0
    seed: Annotated[
        str, _doc("policy", "Demand seed for a first start; empty: the first experts of each layer.", path=True)
    ] = ""
    floor_per_layer: Annotated[
        int, _doc("policy", "Least residents a layer keeps; 0: the model's top-k.", ge=0, le=MOST_SLOTS)
    ] = 0
    max_swaps: Annotated[int, _doc("policy", "Most swaps of one plan.", ge=0, le=MOST_SLOTS)] = 512
    min_prefill_tokens: Annotated[
        int, _doc("policy", "Shorter prompts cause no plan of their own.", ge=1, le=MOST_TOKENS)
    ] = 32
    record: Annotated[bool, _doc("policy", "Write demand to the history (off for benchmarks).")] = True
    replan_chunk_tokens: Annotated[
        int, _doc("policy", "Computed tokens of a longer prompt from which it is planned for; 0: off.", ge=0)
    ] = 256
    replan_decode_tokens: Annotated[
        int, _doc("policy", "Generated tokens of an answer between plans; 0: off.", ge=0)
    ] = 200
    urgent_miss_rate: Annotated[
        float,
        _doc("policy", "Share of an answer's newest picks missed that causes a plan at once; 1: off.", ge=0, le=1),
    ] = 0.1
    urgent_gap_tokens: Annotated[int, _doc("policy", "Generated tokens between urgent plans.", ge=0)] = 150
    urgent_swaps: Annotated[int, _doc("policy", "Most swaps of an urgent plan.", ge=0)] = 64
    hot_ring_slots: Annotated[
        int, _doc("numbers", "Slots for hot reads, on top of the residents.", ge=0, le=MOST_SLOTS)
    ] = 0
    look_rows: Annotated[
        int,
        _doc(
            "policy",
            "Computed rows between two looks of the hot ring at what was wanted; a look takes rank 0 about a "
            "millisecond, and hot reads begin after one.",
            ge=1,
            le=MOST_TOKENS,
        ),
    ] = 1
    light_weight: Annotated[
        float,
        _doc("numbers", "Routing weight below which a missing expert is substituted and never read.", ge=0, le=1),
    ] = 0.02
    fidelity: Annotated[
        Literal["fast", "balanced", "exact"], _doc("policy", "Fidelity of a request that does not say.")
    ] = "fast"
    sync_slots: Annotated[
        int,
        _doc(
            "numbers", "Slots for experts that balanced and exact requests wait for; 0: neither.", ge=0, le=MOST_SLOTS
        ),
    ] = 8
    sync_weight: Annotated[
        float, _doc("numbers", "Routing weight from which a balanced request waits for an expert.", ge=0, le=1)
    ] = 0.2
    sync_reads: Annotated[
        int, _doc("numbers", "Most experts that balanced requests wait for in a step.", ge=0, le=MOST_SLOTS)
    ] = 16


class Cache(Section, frozen=True):
    context_tokens: Annotated[
        int, _doc("numbers", "Most tokens of one request, prompt and answer.", ge=16, le=MOST_TOKENS)
    ]
    pool_tokens: Annotated[int, _doc("numbers", "Tokens of context that all lanes share.", ge=16, le=1 << 32)]
    dtype: Annotated[
        Literal["bf16", "fp8"],
        _doc("numbers", "How GLM-5.3's latents are kept: bf16, as they are computed; fp8, in 656 bytes for 1,152."),
    ] = "bf16"
    split: Annotated[
        bool,
        _doc("numbers", "Each rank keeps its share of every context (GLM-5.3); else every rank keeps all of it."),
    ] = False
    park_tokens: Annotated[
        int,
        _doc(
            "numbers",
            "Tokens of context that may leave a pool that is full for the disk; 0: a request waits until the pool can "
            "hold its longest answer.",
            ge=0,
            le=1 << 32,
        ),
    ] = 1 << 20
    prefix_ram_bytes: Annotated[int, _doc("numbers", "Prompt cache in memory, on each node; 0: none.", ge=0)] = 0
    prefix_disk_bytes: Annotated[int, _doc("numbers", "Prompt cache on disk, on each node; 0: none.", ge=0)] = 0
    prefix_strict: Annotated[
        bool, _doc("numbers", "A cached prompt serves only under the routable set that it was computed under.")
    ] = False


class Engine(Section, frozen=True):
    device: Annotated[Literal["cpu", "cuda"], _doc("numbers", "Where the model runs.")] = "cpu"
    lanes: Annotated[int, _doc("numbers", "Requests computed at the same time.", ge=1, le=64)] = 2
    queue: Annotated[int, _doc("policy", "Requests that may wait for a lane; more get 429.", ge=0, le=10_000)] = 64
    threads: Annotated[  # how a product is cut over threads can change its last bit, and ranks must not differ in one
        int, _doc("numbers", "Arithmetic threads of a rank on CPU.", ge=1, le=256)
    ] = 1
    guard_every_steps: Annotated[
        int, _doc("numbers", "Steps between comparisons of the ranks' digests.", ge=1, le=1 << 20)
    ] = 64
    prefill_share: Annotated[
        float,
        _doc("policy", "Share of the time, at most, that prompts take while answers are running.", ge=0.01, le=0.99),
    ] = 0.3
    loop_break: Annotated[
        int,
        _doc(
            "policy",
            "Times in a row that a cycle of tokens may come before the answer is ended, if a request does not say; "
            "rows of data may come 32 times as often. 0: it may go on.",
            ge=0,
            le=1000,
        ),
    ] = 12
    draft: Annotated[
        Literal["off", "1", "2", "3", "4", "5", "6", "7", "acceptance", "confidence"],
        _doc(
            "numbers",
            "Tokens of the model's own drafter that a step verifies: none, so many, or as many as pay, by what was "
            "accepted lately or by the drafter's own confidence.",
        ),
    ] = "off"


class Parallel(Section, frozen=True):
    ranks: Annotated[int, _doc("numbers", "Processes that share the model.", ge=1, le=MOST_RANKS)] = 1
    hosts: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _doc("node", "One address a rank, rank 0 first; empty: every rank on this machine."),
    ] = ()
    control_port: Annotated[int, _doc("node", "First of two TCP ports of rank 0's control plane.", ge=1, le=65534)] = (
        5710
    )
    data_port: Annotated[int, _doc("node", "TCP port of the data plane's rendezvous.", ge=1, le=65535)] = 5720
    interface: Annotated[str, _doc("node", "Network interface of the data plane; empty: chosen by address.")] = ""
    hca: Annotated[
        str, _doc("node", "RDMA adapters of the data plane on CUDA, as NCCL_IB_HCA names them; empty: NCCL chooses.")
    ] = ""
    gid_index: Annotated[
        int, _doc("node", "Their GID, as NCCL_IB_GID_INDEX counts (RoCE v2: often 3); -1: NCCL chooses.", ge=-1, le=255)
    ] = -1
    one_shot: Annotated[
        bool,
        _doc(
            "numbers",
            "Ranks on one host join small parts by one launch that reads the other GPUs' memory (CUDA IPC, NVLink), "
            "not by NCCL.",
        ),
    ] = False
    key_file: Annotated[
        str,
        _doc(
            "node",
            "CURVE keys of the control plane, the same file on every node; empty: in the state directory.",
            path=True,
        ),
    ] = ""
    heartbeat_s: Annotated[float, _doc("node", "Seconds between heartbeats.", gt=0, le=10)] = 0.5
    peer_timeout_s: Annotated[float, _doc("node", "Silence after which a peer counts as dead.", gt=0, le=120)] = 3.0
    step_timeout_s: Annotated[
        float, _doc("node", "A rank that has work and finishes no step for so long counts as stuck.", gt=0, le=3600)
    ] = 60.0
    start_timeout_s: Annotated[float, _doc("node", "Longest wait for the other ranks at start.", gt=0, le=3600)] = 120.0


class Server(Section, frozen=True):
    host: Annotated[str, _doc("policy", "Address to listen on.", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _doc("policy", "Port to listen on.", ge=1, le=65535)] = 8000
    api_keys_file: Annotated[str, _doc("policy", "File with one API key a line; empty: anyone may ask.", path=True)] = (
        ""
    )
    api_keys_credential: Annotated[
        str, _doc("policy", "The same as a credential of the service manager, by its name (LoadCredential=).")
    ] = ""
    allow_open: Annotated[
        bool, _doc("policy", "Listen without a key on an address that other machines reach; else a start is refused.")
    ] = False
    cors_origins: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _doc("policy", 'Web pages that may ask, by their origin ("https://chat.example"); "*": all. Empty: none.'),
    ] = ()
    model_aliases: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...], _doc("policy", "Further names in the list of models.")
    ] = ()
    strict_model: Annotated[
        bool, _doc("policy", "Answer a request for a model of another name by 404; else it is served all the same.")
    ] = False
    anthropic_stats: Annotated[bool, _doc("policy", "Add `x_engine_stats` to replies of /v1/messages.")] = False
    shared_cache: Annotated[
        bool,
        _doc(
            "policy", "Where there are several keys: what one left in the prompt cache serves all; else its own alone."
        ),
    ] = False
    metrics_open: Annotated[bool, _doc("policy", "Serve /metrics without a key.")] = False
    thinking: Annotated[bool, _doc("policy", "Whether the model thinks first when a request does not say.")] = True
    allow_no_thinking: Annotated[
        bool,
        _doc(
            "policy",
            "Of a model that always thinks (GLM-5.3): take a request without thinking, by closing the reasoning before "
            "it begins; else it is refused.",
        ),
    ] = True
    max_body_bytes: Annotated[int, _doc("policy", "Largest request body.", ge=1024, le=1 << 40)] = 64 << 20
    max_connections: Annotated[
        int, _doc("policy", "Most connections; one more takes the place of an idle one.", ge=4, le=1 << 16)
    ] = 512
    head_timeout_s: Annotated[
        float, _doc("policy", "Longest time from the first byte of a request to the end of its headers.", gt=0, le=600)
    ] = 10.0
    drain_s: Annotated[float, _doc("policy", "Longest wait for running requests at a stop.", ge=0, le=600)] = 30.0


class Vision(Section, frozen=True):
    rank: Annotated[
        int,
        _doc("numbers", "The rank that holds and runs the vision tower; -1: none, images are refused.", ge=-1, le=63),
    ] = -1
    max_images: Annotated[int, _doc("policy", "Most images of one request.", ge=1, le=1024)] = 32
    max_image_bytes: Annotated[int, _doc("policy", "Largest file of an image.", ge=1024, le=1 << 29)] = 20_000_000
    max_pixels: Annotated[
        int, _doc("policy", "Most pixels of an image, by its header, before it is decoded.", ge=1, le=1 << 28)
    ] = 100_000_000
    decode_timeout_s: Annotated[float, _doc("policy", "Longest time to decode an image.", gt=0, le=600)] = 10.0
    url_hosts: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        _doc("policy", "Hosts that images are fetched from, by https; empty: images come as data URLs alone."),
    ] = ()
    url_timeout_s: Annotated[float, _doc("policy", "Longest time to fetch an image.", gt=0, le=600)] = 10.0


class Memory(Section, frozen=True):
    """What a node keeps free. A machine whose memory is used up freezes before anybody is told."""

    reserve_bytes: Annotated[
        int, _doc("node", "Memory of a node that a start leaves free, once all is loaded.", ge=0)
    ] = 512 << 20
    shed_below_bytes: Annotated[
        int,
        _doc("node", "While serving: with less memory free the prompt cache in memory is given up; 0: never.", ge=0),
    ] = 384 << 20
    exit_below_bytes: Annotated[
        int, _doc("node", "While serving: below so much free memory, for exit_after_s, the ranks end; 0: never.", ge=0)
    ] = 256 << 20
    exit_after_s: Annotated[
        float, _doc("node", "Seconds below exit_below_bytes, without a break, that end the ranks.", ge=0, le=60)
    ] = 3.0


class Audit(Section, frozen=True):
    """Finished answers scored again with every expert. What is kept of them, token ids, stays in memory."""

    remember_tokens: Annotated[
        int,
        _doc(
            "policy",
            "Tokens of finished prompts and answers that are kept in memory, so that `tidectl audit` can score them "
            "again; 0: none.",
            ge=0,
            le=1 << 28,
        ),
    ] = 0
    idle_s: Annotated[
        float,
        _doc(
            "policy",
            "Seconds without a request after which kept answers are audited by themselves; 0: never.",
            ge=0,
            le=86400,
        ),
    ] = 0.0


class Settings(Section, frozen=True):
    model: Model
    experts: Experts
    cache: Cache
    tide: Tide = Tide()
    engine: Engine = Engine()
    parallel: Parallel = Parallel()
    server: Server = Server()
    vision: Vision = Vision()
    memory: Memory = Memory()
    audit: Audit = Audit()
