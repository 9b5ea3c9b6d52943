"""Orders of what a chain does in a round: a folder of kernels_src for each, to be timed.

    python docs/notes/drafts/3-orders.py FOLDER
    KDA_JIT_KERNELS_SRC=FOLDER/xxor kda-jit bench --case 1x16384_h16 --schedule pipeline

A name has four letters: where the next V is loaded, measured and judged (x: beside X, r: beside
R's products, o: when O is stored), and where decays are loaded (0: before all else beside X, x, r,
o, or s: when S' is there); a `y` at its end is a __syncwarp() behind R's products, across which
ptxas moves no loads. xxor is the order of hopper and pipeline, xxoo that of fused.
"""

import itertools
import shutil
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "kernels_src"
PLACES = "xro"

WAIT = """        if (!__all_sync(0xffffffffu, landed) && more) stages.wait(next);
        if (more) spot = next;
"""
LOAD_V = "        load_v(spot.tile);\n"
MEASURE = "        v_max = measure_v();\n"
DECAYS = "        load_decay(spot.image);\n"
SHIFT = "        load_shift(spot.image);\n"
DECLARED = "        float v_max;\n        u32 judgement;\n        bool odd, rare;\n"


def parts() -> tuple[str, str, str, str, str, str]:
    """The file before a round's statements, V's scaling, R, O, the judgement, and the rest."""
    text = (SOURCES / "sm90/chain.cuh").read_text()
    x = text.index("        // In the shadow of X, which is under way")
    r = text.index("        wgmma_wait<0>();\n        pin(x);")
    o = text.index("        // In their shadow: the next chunk's decays")
    end = text.index("        wgmma_wait<0>();\n        pin(state.s);\n        __syncwarp();")
    head, beside_x, beside_r = text[:x], text[x:r], text[o:end]
    scaled = beside_x[beside_x.index("        float v_units") : beside_x.index("        shifted =")]
    judged_at = beside_r.index("        const u32 judgement")
    stored = beside_r[beside_r.index("        wgmma_wait<1>();") : judged_at]
    stored = stored.replace("        if (Stages::kBusy) load_decay(spot.image);\n", "")
    judged = beside_r[judged_at:].replace("const u32 judgement", "judgement")
    judged = judged.replace("const bool odd", "odd").replace("const bool rare", "rare")
    shift = "        load_shared_pair(image + kShift, shift_scale, shift);\n"
    head = head.replace(shift, "").replace(
        "    auto load_decay = ",
        f"    auto load_shift = [&](u32 image) {{ {shift.strip()} }};\n    auto load_decay = ",
    )
    first = "    load_decay(spot.image);\n    {"
    head = head.replace(first, "    load_shift(spot.image);\n" + first)
    return head, scaled, text[r:o], stored, judged, text[end:]


def order(v: str, measured: str, judged: str, decays: str, sync: str) -> str:
    head, scaled, r, stored, judgement, rest = parts()
    early = v == "x" or decays in "0x"
    beside_x = "        shifted = shift != 0;\n"
    if decays == "0":
        beside_x += WAIT + SHIFT + DECAYS + scaled
    else:
        beside_x += scaled + WAIT * early
    beside_x += (
        LOAD_V * (v == "x") + (SHIFT + DECAYS) * (decays == "x") + MEASURE * (measured == "x")
    )
    beside_r = WAIT * (not early) + "        __syncwarp();\n" * bool(sync) + LOAD_V * (v == "r")
    beside_r += (SHIFT + DECAYS) * (decays == "r") + SHIFT * (decays in "os" and judged == "r")
    beside_r += MEASURE * (measured == "r") + judgement * (judged == "r")
    late = (
        LOAD_V * (v == "o") + SHIFT * (decays in "os" and judged == "o") + DECAYS * (decays == "o")
    )
    late += MEASURE * (measured == "o") + judgement * (judged == "o")
    if decays == "s":
        rest = rest.replace("        pin(state.s);\n", "        pin(state.s);\n" + DECAYS, 1)
    return head + DECLARED + beside_x + r + beside_r + stored + late + rest


def main() -> None:
    folder = Path(sys.argv[1])
    for places in itertools.product(PLACES, PLACES, "ro", "0xros", ("", "y")):
        if list(places[:3]) != sorted(places[:3], key=PLACES.index):
            continue
        to = folder / "".join(places)
        shutil.copytree(SOURCES, to)
        (to / "sm90/chain.cuh").write_text(order(*places))


if __name__ == "__main__":
    main()
