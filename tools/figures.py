#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Measures the README's figures and prints them as a Markdown table.

Every figure stands beside the least that it should be and the command that gives it. What compares
two programs runs them in turn, round after round, and takes the median of the rounds' ratios.
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys

GROUPS = ("storage", "attention", "factorize", "model", "peers", "quality", "cost")
POLICIES = ("raw", "puzzle", "puzzle-int4")
TEXT = "/usr/share/common-licenses/GPL-3"


def run(command):
    print("+ " + shlex.join(command), file=sys.stderr, flush=True)
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def repeat(option, values):
    return [word for value in values for word in (option, value)]


class Figures:
    """Runs the programs, and prints a row for each figure."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.headed = False

    def tool(self, name, command, *words):
        """The JSON document of a command, and the command as a reader would type it."""
        words = [command] + [str(word) for word in words]
        document = run([os.path.join(self.arguments.build, name)] + words + ["--json"])
        shown = ['"$model"' if word == self.arguments.model else shlex.quote(word) for word in words]
        return document, f"{name} " + " ".join(shown)

    def bench(self, command, *words):
        if command != "storage" and "-t" not in words:
            words += ("-t", self.arguments.threads)
        return self.tool("puzzlekv-bench", command, *words)

    def llama(self, *words):
        """Tokens a second of llama-bench's one test, and the command."""
        words = ["-t", str(self.arguments.threads), "-fa", "1", "-r", "1"] + [str(w) for w in words]
        document = run([self.arguments.llama_bench, "-m", self.arguments.model, "-o", "json"] + words)
        return document[0]["avg_ts"], "llama-bench " + " ".join(words)

    def row(self, figure, value, least="", *commands):
        if not self.headed:
            print("| figure | measured | target | command |\n| --- | --- | --- | --- |")
            self.headed = True
        shown = " against ".join(f"`{command}`" for command in commands) or "the same"
        print(f"| {figure} | {value} | {least} | {shown} |", flush=True)

    # ---- The groups, in order ----

    def storage(self):
        document, command = self.bench(
            "storage", "--shape", "llama-3.1-8b", "--tokens", 16384, *repeat("--kv", POLICIES[1:]))
        for result in document["results"]:
            target = {"puzzle": "0.58755", "puzzle-int4": "0.18678"}[result["kv"]]
            self.row(f"KV bytes at 16,384 tokens, head dimension 128, `{result['kv']}` / raw",
                     f"{result['kv_ratio']:.5f}", target, command)

    def attention(self):
        for tokens in (16384, 32768):
            document, command = self.bench(
                "attention", "--shape", "llama-3.1-8b", "--tokens", tokens, *repeat("--kv", POLICIES))
            where = f"decode attention, llama-3.1-8b, {tokens:,} tokens"
            raw = document["results"][0]
            self.row(f"{where}, `raw`: us a token and layer; share of the read bandwidth, which is",
                     f"{raw['ns_per_token_layer'] / 1000:.0f}; {raw['read_bandwidth_share']:.2f}, "
                     f"{document['read_gb_per_s']:.1f} GB/s",
                     "0.85" if tokens == 32768 else "", command)
            for result, least in zip(document["results"][1:], ("1.5", "2.2")):
                self.row(f"{where}, `{result['kv']}`: us a token and layer; times as fast as raw",
                         f"{result['ns_per_token_layer'] / 1000:.0f}; {result['speedup']:.2f}", least)

    def factorize(self):
        for shape in ("llama-3.1-8b", "smollm2-135m"):
            document, command = self.bench(
                "factorize", "--shape", shape, "--pages", 4096, "-t", 1,
                *repeat("--solver", ("batched", "ssyevd", "ssyevr", "lapack")))
            results = {result["solver"]: result for result in document["results"]}
            # Their speed-ups are against the first, batched.
            best = max(("ssyevd", "ssyevr"), key=lambda name: results[name]["speedup"])
            self.row(f"factorize, {shape}, one thread: us a page; LAPACKE's {best}; times as fast",
                     f"{results['batched']['us_per_page']:.2f}; "
                     f"{results[best]['us_per_page']:.1f}; {1 / results[best]['speedup']:.1f}",
                     "7" if shape == "llama-3.1-8b" else "", command)
            self.row("its squared error beyond the optimum, of the page's squared norm",
                     f"{results['batched']['excess_error']:.1e}", "at most 1e-6")

    def model(self):
        words = ["model", self.arguments.model, "--predict", 33, *repeat("--kv", POLICIES)]
        shallow, first = self.bench(*words, "--prompt-tokens", 8)
        deep, second = self.bench(*words, "--prompt-tokens", 4096)
        grown = [b["tpot_s"] - a["tpot_s"] for a, b in zip(shallow["results"], deep["results"])]
        for result, growth in zip(deep["results"], grown):
            kv = result["kv"]
            limits = ("at most 1.02", "at most 0.78") if kv == "puzzle" else ("", "")
            self.row(f"first token behind 4,096, `{kv}`: s; divided by raw's",
                     f"{result['ttft_s']:.2f}; {result['ttft_ratio']:.3f}", limits[0], second)
            self.row(f"further token behind 4,096, `{kv}`: ms; divided by raw's",
                     f"{1000 * result['tpot_s']:.2f}; {result['tpot_ratio']:.3f}")
            self.row("its part that grows from 8 tokens to 4,096: ms; divided by raw's",
                     f"{1000 * growth:.2f}; {growth / grown[0]:.3f}", limits[1], second, first)

    def peers(self):
        if self.arguments.llama_bench is None:
            print("figures.py: no --llama-bench, so without llama.cpp", file=sys.stderr)
            return
        ours = {}
        theirs = {}
        for _ in range(self.arguments.rounds):
            for name, words in (("pp", ("-p", 4096, "-n", 0)),
                                ("tg", ("-p", 0, "-n", 64)),
                                ("deep", ("-p", 0, "-n", 64, "-d", 4096)),
                                ("deep q8_0", ("-p", 0, "-n", 64, "-d", 4096, "-ctk", "q8_0",
                                               "-ctv", "q8_0"))):
                speed, shown = self.llama(*words)
                theirs.setdefault(name, (shown, []))[1].append(speed)
            for prompt in (1, 4096):
                document, shown = self.bench(
                    "model", self.arguments.model, "--prompt-tokens", prompt, "--predict", 65,
                    "--repeats", 1, *repeat("--kv", POLICIES))
                for result in document["results"]:
                    kv = result["kv"]
                    ours.setdefault(("pp", kv, prompt), (shown, []))[1].append(
                        prompt / result["ttft_s"])
                    ours.setdefault(("tg", kv, prompt), (shown, []))[1].append(1 / result["tpot_s"])
        for figure, mine, peer, least in (
                ("prefill of 4,096 tokens", ("pp", "puzzle", 4096), "pp", "1.5"),
                ("prefill of 4,096 tokens", ("pp", "raw", 4096), "pp", ""),
                ("decode at depth 0", ("tg", "puzzle", 1), "tg", "1.0"),
                ("decode at depth 4,096", ("tg", "puzzle", 4096), "deep", "2.0"),
                ("decode at depth 4,096, q8_0 cache", ("tg", "puzzle", 4096), "deep q8_0", "2.0"),
                ("decode at depth 4,096", ("tg", "puzzle-int4", 4096), "deep", ""),
                ("decode at depth 4,096", ("tg", "raw", 4096), "deep", "")):
            ratio = statistics.median(a / b for a, b in zip(ours[mine][1], theirs[peer][1]))
            self.row(f"{figure}, `{mine[1]}`: tokens a second; llama.cpp's; ours / theirs",
                     f"{statistics.median(ours[mine][1]):.0f}; "
                     f"{statistics.median(theirs[peer][1]):.0f}; {ratio:.2f}", least,
                     ours[mine][0], theirs[peer][0])

    def quality(self):
        document, command = self.tool(
            "puzzlekv-eval", "ppl", self.arguments.model, "-f", TEXT, "--tokens", 2048,
            "--prefill", 1024, *repeat("--kv", POLICIES + ("puzzle:rk=13,rv=12",)))
        for result in document["results"]:
            self.row(f"the GPL under `{result['kv']}`: perplexity; KL divergence from raw; share of "
                     "likeliest tokens that are raw's; KV bytes / raw",
                     f"{result['ppl']:.3f}; {result['kl']:.4f}; {result['top1']:.3f}; "
                     f"{result['kv_ratio']:.3f}", "", command)
            command = ""

    def cost(self):
        contexts = [1024 << i for i in range(7)]
        prompts = [1024, 2048, 4096, 8000]
        decode = {kv: [] for kv in POLICIES}
        factors = []
        for tokens in contexts:
            document, command = self.bench(
                "attention", "--shape", self.arguments.cost_shape, "--tokens", tokens,
                "--repeats", 7, *repeat("--kv", POLICIES))
            for result in document["results"]:
                decode[result["kv"]].append(result["ns_per_token_layer"] * 1e-3)
        for kv in POLICIES:
            self.row(f"decode attention against context, 1K to 64K, `{kv}`: R^2 of a straight line",
                     f"{straightness(contexts, decode[kv]):.4f}", "", command)
        for tokens in prompts:
            document, command = self.bench(
                "model", self.arguments.model, "--prompt-tokens", tokens, "--predict", 1,
                "--repeats", 3, "--kv", "puzzle")
            factors.append(document["results"][0]["factorize_s"])
        self.row("prefill's time in factors against tokens, 1K to 8K: R^2 of a straight line",
                 f"{straightness(prompts, factors):.4f}", "", command)
        if self.arguments.plot is not None:
            plot(self.arguments.plot, self.arguments.cost_shape, contexts, decode, prompts, factors)


def straightness(x, y):
    return statistics.correlation(x, y) ** 2


def plot(path, shape, contexts, decode, prompts, factors):
    """Both costs side by side, as points on their straight lines."""
    script = [f"""set terminal svg size 900,360 font "sans-serif,11" background "white"
set output "{path}"
set multiplot layout 1,2
set key left top
set grid
set xrange [0:*]
set yrange [0:*]
set format x "%gK"
set samples 2
set xlabel "context, tokens"
set ylabel "attention of one token and layer, us"
set title "Decode, {shape}"
"""]
    for i, (kv, times) in enumerate(decode.items()):
        points = "".join(f"{x / 1024} {y}\n" for x, y in zip(contexts, times))
        script.append(f"$decode{i} << END\n{points}END\n"
                      f"f{i}(x) = a{i} + b{i} * x\nfit f{i}(x) $decode{i} via a{i}, b{i}\n")
    script.append("plot " + ", ".join(
        f'$decode{i} with points pt 7 lc {i + 1} title "{kv}", f{i}(x) lc {i + 1} notitle'
        for i, kv in enumerate(decode)) + "\n")
    points = "".join(f"{x / 1024} {y}\n" for x, y in zip(prompts, factors))
    script.append(f"""$factors << END
{points}END
g(x) = c + d * x
fit g(x) $factors via c, d
set xlabel "prompt, tokens"
set ylabel "time in factors, s"
set title "Prefill, puzzle"
plot $factors with points pt 7 lc 2 notitle, g(x) lc 2 notitle
""")
    subprocess.run(["gnuplot"], input="set fit quiet logfile '/dev/null'\n" + "".join(script),
                   text=True, check=True)
    print(f"figures.py: wrote {path}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="SmolLM2, of tools/fetch-model.sh")
    parser.add_argument("groups", metavar="GROUP", nargs="*", help=f"of {', '.join(GROUPS)} (all)")
    parser.add_argument("--build", default=os.path.join(os.path.dirname(__file__), "..", "build"),
                        help="where the programs are (build, beside tools)")
    parser.add_argument("--llama-bench", default=os.environ.get("LLAMA_BENCH"),
                        help="the program of tools/build-llama-bench.sh ($LLAMA_BENCH)")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of all programs (2)")
    parser.add_argument("--rounds", type=int, default=3, help="against llama.cpp (3)")
    parser.add_argument("--cost-shape", default="llama-3.1-8b",
                        help="shape that cost is told of; its 64K tokens take 16 GiB (llama-3.1-8b)")
    parser.add_argument("--plot", metavar="FILE", help="draw cost's figures, as SVG")
    arguments = parser.parse_intermixed_args()
    for group in arguments.groups:
        if group not in GROUPS:
            parser.error(f"{group}: unknown group; there are: {', '.join(GROUPS)}")
    if arguments.plot is not None and arguments.groups and "cost" not in arguments.groups:
        parser.error("--plot: draws the figures of cost")
    if not os.path.exists(os.path.join(arguments.build, "puzzlekv-bench")):
        parser.error(f"--build {arguments.build}: there is no puzzlekv-bench")
    if os.getloadavg()[0] > 0.5:
        print(f"figures.py: the load average is {os.getloadavg()[0]:.1f}: what else runs slows all "
              "of this, and llama.cpp, whose threads spin, the most", file=sys.stderr)
    figures = Figures(arguments)
    try:
        for group in GROUPS:
            if not arguments.groups or group in arguments.groups:
                getattr(figures, group)()
    except subprocess.CalledProcessError as error:
        sys.exit(f"figures.py: {error.cmd[0]}: status {error.returncode}")
    except OSError as error:
        sys.exit(f"figures.py: {error}")


if __name__ == "__main__":
    main()
