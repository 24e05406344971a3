"""The command line on a tiny model saved to disk."""

import json

import pytest


def test_policies_lists_every_field(call):
    from kvcompress.plugins import registry

    code, out, _ = call("policies")
    assert code == 0
    for name, entry in registry().policies.items():
        assert name in out
        for field in entry.policy.model_fields:
            assert field in out


def test_schema(call):
    code, out, _ = call("policies", "--schema", "snapkv")
    schema = json.loads(out)
    assert code == 0
    assert schema["properties"]["window_size"]["description"]
    assert schema["additionalProperties"] is False


def test_generate_from_file_and_stdin(call, saved_model, tmp_path):
    text = "a long prompt, " * 20
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    options = ["--model", saved_model, "--max-new-tokens", 6]
    options += ["--policy", "snapkv:capacity=40:window_size=8"]
    code, from_file, err = call("generate", file, *options)
    assert code == 0
    assert f"{len(text) + len('[user][assistant]')} prompt tokens" in err.replace("\n", " ")
    assert "45 of" in err
    code, from_stdin, _ = call("generate", *options, stdin=text)
    assert (code, from_stdin) == (0, from_file)
    code, _, err = call("generate", file, *options, "--no-chat")
    assert code == 0 and f"{len(text)} prompt tokens" in err.replace("\n", " ")


def test_generate_in_chunks(call, saved_model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("a long prompt, " * 20)
    options = [file, "--model", saved_model, "--max-new-tokens", 6]
    small, ample = (f"snapkv:capacity={rows}:window_size=8" for rows in (40, 400))
    chunks = ["--prefill-chunk-size", 64]
    code, plain, _ = call("generate", *options, "--policy", ample)
    assert (code, plain) == call("generate", *options, "--policy", ample, *chunks)[:2]
    code, _, err = call("generate", *options, "--policy", small, *chunks, "--lookahead", 16)
    assert code == 0 and "45 of" in err
    for option in ("--lookahead", "--spare"):
        code, out, err = call("generate", *options, "--policy", small, option, 16)
        assert code == 2 and out == "" and "--prefill-chunk-size" in err
    code, _, err = call("generate", *options, "--policy", small, *chunks, "--spare", 400)
    assert code == 0 and "45 of" in err
    code, out, err = call("generate", *options, "--policy", small, *chunks, "--spare", -1)
    assert code == 2 and out == "" and "--spare" in err
    code, out, err = call("generate", *options, "--policy", small, *chunks, "--lookahead", 90)
    assert code == 1 and out == "" and "lookahead=90" in err


def test_a_prompt_that_is_no_text(call, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"a prompt \xff\xfe")
    code, out, err = call("generate", file)
    assert code == 2 and out == "" and "cannot be read" in err and "UTF-8" in err
    assert "Traceback" not in err


def test_compare_shows_both(call, saved_model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("a long prompt, " * 20)
    code, out, _ = call(
        "generate", file, "--model", saved_model, "--compare", "--max-new-tokens", 5,
        "--policy", "snapkv:capacity=40:window_size=8", "--sample", "--temperature", "0.7",
    )  # fmt: skip
    assert code == 0
    assert "compressed" in out and "uncompressed" in out
    assert out.count("ms a token") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "snapvk"], "Did you mean 'snapkv'"),
        (["--policy", "snapkv:capacity=8"], "window_size=32 must be smaller"),
        (["--policy", "snapkv:windw_size=8"], "Did you mean 'window_size'"),
    ],
)
def test_errors_are_one_message(call, arguments, message, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("text")
    code, out, err = call("generate", file, *arguments)
    assert code == 1 and out == ""
    assert message in err and err.startswith("error: ") and "Traceback" not in err


@pytest.mark.parametrize(("arguments", "stdin"), [(["nowhere.txt"], None), (["-"], "  \n")])
def test_prompts_that_are_not_there(call, arguments, stdin):
    code, out, err = call("generate", *arguments, stdin=stdin)
    assert code == 2 and out == "" and ("not a file" in err or "empty" in err)


def test_help_names_all_commands(call):
    code, out, _ = call("--help")
    assert code == 0
    for command in ("generate", "policies", "demo", "bench"):
        assert command in out
