"""The page of what is kept, and the terminal's; on a tiny model."""

import json
import re
import shutil
import subprocess

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES = ["snapkv:capacity=40:window_size=8", "h2o:capacity=40"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def shown(saved_model, tmp_path_factory):
    """A page made by the command, its data, and what was printed."""
    import contextlib
    import io

    from kvcompress_eval.show import show

    folder = tmp_path_factory.mktemp("show")
    (folder / "prompt.txt").write_text("A <b>bold</b> </script> word, " * 6)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show(
            prompt=folder / "prompt.txt",
            model=str(saved_model),
            policy=POLICIES,
            chat=True,
            device="cpu",
            out=folder / "show.html",
        )
    page = (folder / "show.html").read_text()
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return folder / "show.html", page, json.loads(text), printed.getvalue()


def test_the_page_has_what_was_kept(shown, saved_model):
    from kvcompress_eval.show import LEVELS

    from kvcompress import press
    from kvcompress.models import load

    _, _, data, printed = shown
    assert "".join(data["tokens"]) == f"[user]{'A <b>bold</b> </script> word, ' * 6}[assistant]"
    model, tokenizer = load(str(saved_model), device="cpu")
    ids = torch.tensor([tokenizer("".join(data["tokens"]))["input_ids"]])
    for policy, found in zip(POLICIES, data["policies"], strict=True):
        assert found["label"] == policy and policy in printed
        with press(model, policy) as session, torch.no_grad():
            output = model(ids)  # keeps the cache alive
            assert found["layers"] == [0, 1, 2] and output.logits.shape[1] == ids.shape[1]
            for row, layer in zip(found["kept"], session.cache.layers, strict=True):
                counts = torch.zeros(ids.shape[1], dtype=torch.long)
                for head in layer.positions[0]:
                    counts[head] += 1
                assert found["levels"] == found["heads"] == layer.positions.shape[1]
                assert [LEVELS.index(level) for level in row] == counts.tolist()


def test_the_page_needs_nothing_else(shown):
    _, page, _, _ = shown
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)
    assert page.count("</script>") == 2  # the prompt's own is escaped


def test_the_terminal_shades_every_token():
    from kvcompress_eval.show import Kept, shaded

    kept = Kept("snapkv", torch.tensor([[0.0, 0.5, 1.0], [0.0, 1.0, 1.0]]), [0, 1], 2)
    text = shaded(["one ", "two ", "three"], kept)
    assert text.plain == "one two three"
    styles = [str(span.style) for span in text.spans]
    assert styles == ["dim", "black on rgb(165,165,40)", "black on rgb(200,200,40)"]


def test_a_prompt_that_is_not_there(call):
    code, out, err = call("show", "nowhere.txt")
    assert code == 2 and out == "" and "'nowhere.txt' is not a file" in err


@pytest.mark.parametrize("command", ["show", "observe"])
def test_a_prompt_that_is_no_text(call, saved_model, tmp_path, command):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"a prompt \xff\xfe")
    code, _, err = call(command, file, "--model", saved_model, "--device", "cpu")
    assert code == 1 and "prompt.bin cannot be read" in err.replace("\n", "")


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="there is no Chromium")
@pytest.mark.parametrize(("policy", "layer"), [(0, -1), (1, 2)])
def test_the_page_in_a_browser(shown, tmp_path, policy, layer):
    path, _, data, _ = shown
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path}"]
    command += ["--dump-dom", f"{path.as_uri()}#policy={policy}&layer={layer}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    kept = data["policies"][policy]
    [body] = re.findall(r'<main id="text">(.*?)</main>', done.stdout, re.S)
    shades = [
        float(found) for found in re.findall(r"rgba?\(255,? 170,? 0(?: /|,) ?([\d.]+)\)", body)
    ]
    rows = [[int(level, 36) / kept["levels"] for level in row] for row in kept["kept"]]
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    wanted = rows[layer] if layer >= 0 else means
    # What is shaded fully loses its alpha value in the page.
    assert shades == pytest.approx([value for value in wanted if value < 1], abs=0.01)
    assert ("layer 2" if layer >= 0 else "mean of 3 layers") in done.stdout
