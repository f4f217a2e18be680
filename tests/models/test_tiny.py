"""The tiny checkpoint against the official layout, against Transformers, and through every name scheme the loader accepts."""

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV4Config, DeepseekV4ForCausalLM

from lamina.base.errors import ConfigError
from lamina.models.deepseek_v4_names import NAMES, TO_TRANSFORMERS
from lamina.models.tiny import BOS, CONTROL, EOS, PAD, SHAPES, tiny_config, write_tiny
from lamina.weights.loader import Checkpoint, read_config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each shape in each format, as <shape>-<format>."""
    root = tmp_path_factory.mktemp("tiny")
    for shape in SHAPES:
        for file_format in ("official", "transformers"):
            write_tiny(root / f"{shape}-{file_format}", shape, 3, file_format)
    return root


def stored(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118


def logical(directory: Path) -> dict[str, tuple[int, ...]]:
    """Canonical name -> logical shape of the tensors of an official checkpoint, scales and MTP left out."""
    found = {}
    for name, (dtype, shape) in stored(directory).items():
        if not name.endswith(".scale") and not name.startswith("mtp."):
            found[name] = (shape[0], 2 * shape[1]) if dtype == "I8" else shape
    return found


def load(directory: Path, shapes: dict[str, tuple[int, ...]], experts: int = 8) -> dict[str, Tensor]:
    """Every tensor of `shapes`, each taken once, nothing left over."""
    with Checkpoint(directory, NAMES) as checkpoint:
        tensors = {
            name: checkpoint.take_int(name, shape, 0, experts) if name.endswith("tid2eid") else checkpoint.take(name, shape)
            for name, shape in shapes.items()
        }
        checkpoint.finish()
    return tensors


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(bits(left[name]), bits(right[name])) for name in left)


def official_table(config: dict[str, object]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(regex, dtype, shape) rows of the reference's section 8.2, "FP8" and "FP4" meaning a pair."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, heads, width, experts, rank = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["head_dim"],
        c["n_routed_experts"],
        c["q_lora_rank"],
    )
    groups, out, inner = c["o_groups"], c["o_groups"] * c["o_lora_rank"], c["moe_intermediate_size"]
    index_heads, index = c["index_n_heads"], c["index_head_dim"]
    ratios = config["compress_ratios"]
    assert isinstance(ratios, list) and len(ratios) == c["num_hidden_layers"] + c["num_nextn_predict_layers"]
    by_ratio = {ratio: "|".join(str(n) for n, r in enumerate(ratios[:-1]) if r == ratio) or "none" for ratio in (4, 128)}
    block = r"(?:layers\.\d+|mtp\.0)"
    hashed = "|".join(str(n) for n in range(c["num_hash_layers"]))
    yield r"(?:embed|head)\.weight", "BF16", (c["vocab_size"], hidden)
    yield r"norm\.weight", "BF16", (hidden,)
    for prefix in ("", r"mtp\.0\."):
        yield prefix + "hc_head_fn", "F32", (4, 4 * hidden)
        yield prefix + "hc_head_base", "F32", (4,)
        yield prefix + "hc_head_scale", "F32", (1,)
    yield block + r"\.hc_(?:attn|ffn)_fn", "F32", (24, 4 * hidden)
    yield block + r"\.hc_(?:attn|ffn)_base", "F32", (24,)
    yield block + r"\.hc_(?:attn|ffn)_scale", "F32", (3,)
    yield block + r"\.(?:attn_norm|ffn_norm)\.weight", "BF16", (hidden,)
    yield block + r"\.attn\.attn_sink", "F32", (heads,)
    yield block + r"\.attn\.wq_a", "FP8", (rank, hidden)
    yield block + r"\.attn\.q_norm\.weight", "BF16", (rank,)
    yield block + r"\.attn\.wq_b", "FP8", (heads * width, rank)
    yield block + r"\.attn\.wkv", "FP8", (width, hidden)
    yield block + r"\.attn\.kv_norm\.weight", "BF16", (width,)
    yield block + r"\.attn\.wo_a", "FP8", (out, heads * width // groups)
    yield block + r"\.attn\.wo_b", "FP8", (hidden, out)
    for ratio, coff in ((4, 2), (128, 1)):
        compressor = rf"layers\.(?:{by_ratio[ratio]})\.attn\.compressor"
        yield compressor + r"\.ape", "F32", (ratio, coff * width)
        yield compressor + r"\.(?:wkv|wgate)\.weight", "BF16", (coff * width, hidden)
        yield compressor + r"\.norm\.weight", "BF16", (width,)
    indexer = rf"layers\.(?:{by_ratio[4]})\.attn\.indexer"
    yield indexer + r"\.wq_b", "FP8", (index_heads * index, rank)
    yield indexer + r"\.weights_proj\.weight", "BF16", (index_heads, hidden)
    yield indexer + r"\.compressor\.ape", "F32", (4, 2 * index)
    yield indexer + r"\.compressor\.(?:wkv|wgate)\.weight", "BF16", (2 * index, hidden)
    yield indexer + r"\.compressor\.norm\.weight", "BF16", (index,)
    yield block + r"\.ffn\.gate\.weight", "BF16", (experts, hidden)
    yield rf"(?:layers\.(?!(?:{hashed})\.)\d+|mtp\.0)\.ffn\.gate\.bias", "F32", (experts,)
    yield rf"layers\.(?:{hashed})\.ffn\.gate\.tid2eid", "I64", (c["vocab_size"], c["num_experts_per_tok"])
    for expert, storage in ((r"experts\.\d+", "FP4"), ("shared_experts", "FP8")):
        yield rf"{block}\.ffn\.{expert}\.(?:w1|w3)", storage, (inner, hidden)
        yield rf"{block}\.ffn\.{expert}\.w2", storage, (hidden, inner)
    yield r"mtp\.0\.(?:e_proj|h_proj)", "FP8", (hidden, hidden)
    yield r"mtp\.0\.(?:enorm|hnorm|norm)\.weight", "BF16", (hidden,)


def test_the_official_file_is_the_official_table(made: Path) -> None:
    for shape in SHAPES:
        rows = []
        for pattern, kind, size in official_table(tiny_config(shape)):
            if kind == "FP8":
                rows += [
                    (pattern + r"\.weight", "F8_E4M3", size),
                    (pattern + r"\.scale", "F8_E8M0", (-(-size[0] // 128), -(-size[1] // 128))),
                ]
            elif kind == "FP4":
                rows += [
                    (pattern + r"\.weight", "I8", (size[0], size[1] // 2)),
                    (pattern + r"\.scale", "F8_E8M0", (size[0], size[1] // 32)),
                ]
            else:
                rows.append((pattern, kind, size))
        unmatched = set(range(len(rows)))
        for name, found in stored(made / f"{shape}-official").items():
            matches = [index for index, row in enumerate(rows) if re.fullmatch(row[0], name)]
            assert len(matches) == 1, name
            assert found == rows[matches[0]][1:], name
            unmatched.discard(matches[0])
        assert all("none" in rows[index][0] for index in unmatched), unmatched


def test_both_formats_are_one_model_bit_for_bit(made: Path) -> None:
    for shape in SHAPES:
        shapes = logical(made / f"{shape}-official")
        official = load(made / f"{shape}-official", shapes)
        assert same(official, load(made / f"{shape}-transformers", shapes))
        assert all(tensor.numel() == 1 or tensor.float().std() > 0 for tensor in official.values())
        for name, tensor in official.items():
            if name.endswith("tid2eid"):
                assert (tensor.sort(dim=1).values.diff(dim=1) > 0).all()


def test_mtp_is_ignored_and_counted(made: Path) -> None:
    tensors = {name: value for name, value in stored(made / "flash-official").items() if name.startswith("mtp.")}
    assert Checkpoint(made / "flash-official", NAMES).ignored.count == len(tensors) > 60
    assert Checkpoint(made / "flash-transformers", NAMES).ignored.count == 0


@pytest.fixture(scope="module")
def rivals(made: Path) -> dict[str, DeepseekV4ForCausalLM]:
    """Transformers' model of each shape, loaded strictly."""
    models = {}
    for shape in SHAPES:
        model, report = DeepseekV4ForCausalLM.from_pretrained(
            made / f"{shape}-transformers", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(report.values()), report
        models[shape] = model.eval()
    return models


def test_transformers_holds_the_same_numbers(made: Path, rivals: dict[str, DeepseekV4ForCausalLM]) -> None:
    for shape, model in rivals.items():
        official = load(made / f"{shape}-official", logical(made / f"{shape}-official"))
        state = model.state_dict()
        for name, tensor in official.items():
            expert = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight", name)
            if expert is None:
                found = state[TO_TRANSFORMERS.rename(name)]
            else:
                layer, index, part = f"model.layers.{expert[1]}.mlp.experts.", int(expert[2]), expert[3]
                fused = state[layer + ("down_proj" if part == "w2" else "gate_up_proj")][index]
                found = {"w1": fused[: len(fused) // 2], "w2": fused, "w3": fused[len(fused) // 2 :]}[part]
            assert torch.equal(found, tensor), name


def test_what_transformers_saves_loads_to_equal_tensors(
    made: Path, rivals: dict[str, DeepseekV4ForCausalLM], tmp_path: Path
) -> None:
    fresh = DeepseekV4ForCausalLM(rivals["flash"].config)  # one that was loaded is saved under the names it was loaded from
    fresh.load_state_dict(rivals["flash"].state_dict())
    fresh.save_pretrained(tmp_path / "one")
    fresh.save_pretrained(tmp_path / "many", max_shard_size="3MB")
    assert not (tmp_path / "many" / "model.safetensors").exists()
    names = set(stored(tmp_path / "one"))
    assert "layers.0.attn.norm.weight" in {name.removeprefix("model.") for name in names}  # the spelling that is nobody's
    shapes = logical(made / "flash-official")
    official = load(made / "flash-official", shapes)
    assert same(official, load(tmp_path / "one", shapes)) and same(official, load(tmp_path / "many", shapes))


def test_the_recipe_of_the_reference_loads(tmp_path: Path) -> None:
    config = DeepseekV4Config(
        vocab_size=257, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=5, num_attention_heads=4, head_dim=32,
        num_key_value_heads=1, qk_rope_head_dim=8, q_lora_rank=24, o_groups=2, o_lora_rank=16, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, num_hash_layers=2, index_n_heads=16, index_head_dim=16, index_topk=8,
        sliding_window=128, compress_ratios=[0, 4, 128, 4, 128, 0], max_position_embeddings=1024, tie_word_embeddings=False,
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    )  # fmt: skip
    DeepseekV4ForCausalLM(config).save_pretrained(tmp_path)
    shapes = {
        "embed.weight": (257, 64),
        "layers.1.attn.indexer.compressor.wgate.weight": (32, 64),
        "layers.1.attn.indexer.wq_b.weight": (256, 24),
        "layers.2.attn.compressor.ape": (128, 32),
        "layers.4.ffn.experts.7.w2.weight": (64, 32),
        "layers.0.attn.kv_norm.weight": (32,),
        "layers.0.ffn.shared_experts.w3.weight": (32, 64),
        "layers.2.ffn.gate.bias": (8,),
        "layers.3.hc_attn_fn": (24, 256),
        "hc_head_scale": (1,),
        "norm.weight": (64,),
    }
    with Checkpoint(tmp_path, NAMES) as checkpoint:
        for name, shape in shapes.items():
            checkpoint.take(name, shape)
        checkpoint.take_int("layers.1.ffn.gate.tid2eid", (257, 2), 0, 8)


def test_names_round_trip_and_canonical_ones_stay(made: Path) -> None:
    names = [*stored(made / "flash-official"), *stored(made / "pro-official")]
    assert NAMES.rename_all(names) == names
    main = [name for name in names if not name.startswith("mtp.")]
    for name in main:
        theirs = TO_TRANSFORMERS.rename(name)
        assert NAMES.rename(theirs) == name
        assert NAMES.rename(theirs.removesuffix(".scale") + ".weight_scale_inv" if name.endswith(".scale") else theirs) == name
    assert len({TO_TRANSFORMERS.rename(name) for name in main}) == len(set(main))


@pytest.mark.parametrize(
    ("stored_name", "canonical"),
    [
        ("model.layers.3.self_attn.q_b_proj.weight_scale_inv", "layers.3.attn.wq_b.scale"),
        ("model.layers.3.self_attn.compressor.indexer.q_b_proj.weight", "layers.3.attn.indexer.wq_b.weight"),
        ("model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight", "layers.3.attn.indexer.weights_proj.weight"),
        ("model.layers.3.self_attn.compressor.indexer.kv_norm.weight", "layers.3.attn.indexer.compressor.norm.weight"),
        ("model.layers.3.self_attn.compressor.position_bias", "layers.3.attn.compressor.ape"),
        ("model.layers.3.mlp.experts.11.up_proj.weight", "layers.3.ffn.experts.11.w3.weight"),
        ("model.layers.10.attn.norm.weight", "layers.10.attn.kv_norm.weight"),
        ("model.layers.10.attn_norm.weight", "layers.10.attn_norm.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("head.weight", "head.weight"),
        ("model.embed_tokens.weight", "embed.weight"),
        ("model.norm.weight", "norm.weight"),
    ],
)
def test_spellings(stored_name: str, canonical: str) -> None:
    assert NAMES.rename(stored_name) == canonical


def test_fused_expert_scales() -> None:
    places = NAMES.places(NAMES.rename("model.layers.2.mlp.experts.gate_up_proj_scale_inv"), (2, 4, 3))
    assert [place.name for place in places] == [
        f"layers.2.ffn.experts.{index}.{part}.scale" for index in range(2) for part in ("w1", "w3")
    ]


@torch.inference_mode()
def test_logits_have_unit_spread_and_remember(rivals: dict[str, DeepseekV4ForCausalLM]) -> None:
    for model in rivals.values():
        ids = torch.arange(40, 140).unsqueeze(0)
        logits = model(ids).logits[0]
        assert 0.7 < logits.std() < 1.4
        assert len(set(logits.argmax(dim=-1).tolist())) > 30
        ids[0, 0] = 300
        assert (model(ids).logits[0, -1] - logits[-1]).abs().max() > 0.05


def test_config_is_complete(made: Path) -> None:
    for shape in SHAPES:
        assert read_config(made / f"{shape}-official") == tiny_config(shape)
        config = read_config(made / f"{shape}-transformers")
        ratios = tiny_config(shape)["compress_ratios"]
        assert isinstance(ratios, list) and config["compress_ratios"] == ratios[:-1] and "quantization_config" not in config
    assert tiny_config("bench")["head_dim"] == 512 and tiny_config("pro")["compress_ratios"] == [128, 128, 4, 128, 4, 0]
    with pytest.raises(ConfigError, match=r"shape='huge'.*flash"):
        tiny_config("huge")


def test_tokenizer(made: Path) -> None:
    directory = made / "flash-official"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.token_to_id(token) for token in CONTROL] == list(range(1024 - len(CONTROL), 1024))
    text = "Größe 1234 = 你好 \U0001f600\r\n\tdef f(x): return x\x00 "
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert [tokenizer.decode([index]) for index in tokenizer.encode("2048", add_special_tokens=False).ids] == list("2048")
    turn = f"{BOS}<｜User｜>hi<｜Assistant｜><think>x</think>｜DSML｜{EOS}"
    ids = tokenizer.encode(turn, add_special_tokens=False).ids
    assert ids[0] == 0 and ids[-1] == 1 and ids[1] == tokenizer.token_to_id("<｜User｜>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == turn
    assert tokenizer.decode(ids) == turn.removeprefix(BOS).removesuffix(EOS)
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 1


def test_a_seed_is_a_model(made: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "again", "flash", 3)
    write_tiny(tmp_path / "other", "flash", 4)
    files = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (made / "flash-official" / name).read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (made / "flash-official" / "model.safetensors").read_bytes()


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "model"
    write_tiny(target)
    before = (target / "model.safetensors").read_bytes()
    plain = tmp_path / "plain"
    plain.mkdir()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    for call in (
        lambda: write_tiny(target),
        lambda: write_tiny(target / "config.json"),
        lambda: write_tiny(plain, "huge"),
        lambda: write_tiny(plain, seed=-1),
        lambda: write_tiny(plain, file_format="gguf"),
    ):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            call()
    assert (target / "model.safetensors").read_bytes() == before and not list(plain.iterdir())

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("lamina.models.tiny.write_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny(tmp_path / "never")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "plain"]
    monkeypatch.undo()
    write_tiny(plain)  # an existing empty directory is fine
    assert (plain / "config.json").is_file()
