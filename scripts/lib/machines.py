"""The table of scripts/test-vm: what each machine said of each check. Standard library only."""

import argparse
import json
import pathlib
import sys


def said_by(folder, machine):
    file = folder / machine / "results.jsonl"
    results = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            results.append(json.loads(line))
        except ValueError:
            results.append({"check": "(unreadable)", "ok": False, "note": line[:200], "seconds": 0})
    if not any("done" in result for result in results):
        note = f"the machine did not come to its end; {folder / machine / 'console.log'} has its last words"
        results.append({"check": "(end)", "ok": False, "note": note, "seconds": 0})
    return results


def main():
    parser = argparse.ArgumentParser(prog="scripts/test-vm")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("machines", nargs="+")
    given = parser.parse_args()
    said = {machine: said_by(given.folder, machine) for machine in given.machines}
    good = True
    names = []
    for results in said.values():
        names += [result["check"] for result in results if "check" in result and result["check"] not in names]
        good = good and all(result["ok"] for result in results if "check" in result)
    # Every machine has to have tried what any has.
    tried = {machine: {result.get("check") for result in results} for machine, results in said.items()}
    good = good and all(name in checks for checks in tried.values() for name in names)
    if given.json:
        for machine, results in said.items():
            for result in results:
                print(json.dumps({"machine": machine, **result}))
        sys.exit(0 if good else 1)
    kernels = {machine: next((one["kernel"] for one in results if "kernel" in one), "?") for machine, results in said.items()}
    width = max([len(name) for name in names] + [5])
    print(f"{'':{width}}  " + "  ".join(f"{f'{machine} ({kernels[machine]})':34}" for machine in said))
    for name in names:
        cells = []
        for results in said.values():
            one = next((result for result in results if result.get("check") == name), None)
            cell = "not tried" if one is None else f"{'ok' if one['ok'] else 'FAILED'}  {one['seconds']} s"
            cells.append(f"{cell:34}")
        print(f"{name:{width}}  " + "  ".join(cells))
    print()
    for machine, results in said.items():
        for one in results:
            if one.get("note"):
                print(f"{machine}, {one.get('check')}: {one['note']}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
