//! An honest read-only: real programs compute, the tree stays as it was, and each attempted write has a receipt.

use tollgate_tests::{
    every_identity, every_way,
    world::{on_path, SENTINEL},
    Finished, World,
};

fn read_only(world: &World, command: &[&str]) -> Finished {
    let mut arguments = vec!["--read-only", "--"];
    arguments.extend(command);
    world.run(arguments).finish()
}

/// Fails unless a denied receipt names each of these workspace paths.
#[track_caller]
fn denied(world: &World, paths: &[&str]) {
    let receipts = world.receipts(&["--denied"]);
    for path in paths {
        assert!(
            receipts.iter().any(|receipt| {
                let kind = receipt["kind"].as_str().unwrap_or_default();
                let resource = receipt["resource"]["path"].as_str().unwrap_or_default();
                kind.starts_with("fs/")
                    && kind != "fs/read"
                    && (resource == *path || resource.ends_with(&format!("/{path}")))
            }),
            "no denied receipt for {path}: {receipts:#?}"
        );
    }
}

#[test]
fn python_computes_and_cannot_write() {
    every_way(|world| {
        world.write("data.txt", "1 2 3");
        world.write("mod.py", "def total(text): return sum(map(int, text.split()))\n");
        let before = world.snapshot();
        let output =
            read_only(world, &["/usr/bin/python3", "-c", "import mod; print(mod.total(open('data.txt').read()))"]);
        assert_eq!((output.status, output.out().as_str()), (0, "6\n"), "{output}");
        before.assert_same(&world.snapshot());
        let output = read_only(
            world,
            &["/usr/bin/python3", "-c", "import os\nfor f in (lambda: open('new','w'), lambda: open('data.txt','a'), lambda: os.unlink('mod.py'), lambda: os.mkdir('made'), lambda: os.chmod('data.txt', 0o600), lambda: os.rename('data.txt','moved')):\n  try: f(); print('WROTE')\n  except OSError as e: print(e.errno)"],
        );
        assert_eq!(output.status, 0, "{output}");
        assert!(output.out().lines().count() == 6 && !output.out().contains("WROTE"), "{output}");
        before.assert_same(&world.snapshot());
        denied(world, &["new", "data.txt", "mod.py", "made"]);
    });
}

#[test]
fn a_shell_computes_and_cannot_write() {
    every_way(|world| {
        world.write("a", "kept");
        let before = world.snapshot();
        let output = read_only(world, &["sh", "-c", "n=0; for i in 1 2 3; do n=$((n+i)); done; cat a; echo $n"]);
        assert_eq!((output.status, output.out().as_str()), (0, "kept6\n"), "{output}");
        let output = read_only(
            world,
            &[
                "sh",
                "-c",
                "echo x > new; echo y >> a; rm -f a; mkdir d; ln -s a l; touch -d 2001-01-01 a; mv a b; true",
            ],
        );
        assert_eq!(output.status, 0, "{output}");
        before.assert_same(&world.snapshot());
        denied(world, &["new", "a", "d"]);
        // Its private folders are its own.
        let output = read_only(world, &["sh", "-c", "echo t > /tmp/t && echo h > ~/h && cat /tmp/t ~/h"]);
        assert_eq!((output.status, output.out().as_str()), (0, "t\nh\n"), "{output}");
    });
}

#[test]
fn git_reads_and_cannot_commit() {
    every_way(|world| {
        let id = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; ";
        world
            .shell(&format!("{id} git init -q -b main . && echo a > a && git add a && git commit -qm first"))
            .finish()
            .expect_status(0);
        let before = world.snapshot();
        let output = read_only(world, &["git", "log", "--format=%s"]);
        assert_eq!((output.status, output.out().as_str()), (0, "first\n"), "{output}");
        read_only(world, &["git", "status", "--porcelain"]).expect_status(0);
        before.assert_same(&world.snapshot());
        let output = read_only(
            world,
            &["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "second"],
        );
        assert_ne!(output.status, 0, "{output}");
        before.assert_same(&world.snapshot());
        assert!(!world.receipts(&["--denied"]).is_empty(), "the refused commit has no receipt");
    });
}

#[test]
fn a_compiler_builds_elsewhere_and_not_here() {
    every_way(|world| {
        world.write("a.c", "int main(void){return 0;}\n");
        let before = world.snapshot();
        let output = read_only(world, &["sh", "-c", "cc -o /tmp/a a.c && /tmp/a"]);
        assert_eq!(output.status, 0, "{output}");
        let output = read_only(world, &["cc", "-o", "a", "a.c"]);
        assert_ne!(output.status, 0, "{output}");
        before.assert_same(&world.snapshot());
        denied(world, &["a"]);
    });
}

#[test]
fn pytest_passes_without_a_cache() {
    if !(on_path("pytest")) {
        eprintln!("skipped: no `pytest` on the path of the worlds");
        return;
    }
    every_way(|world| {
        world.write("test_a.py", "def test_a(): assert 1 + 1 == 2\n");
        let before = world.snapshot();
        read_only(world, &["pytest", "-q"]).expect_status(0);
        before.assert_same(&world.snapshot());
    });
}

#[test]
fn python_test_suites_pass_without_a_cache() {
    every_way(|world| {
        world.write(
            "test_a.py",
            "import unittest\nclass A(unittest.TestCase):\n  def test_a(self): self.assertEqual(1 + 1, 2)\n",
        );
        let before = world.snapshot();
        read_only(world, &["/usr/bin/python3", "-m", "unittest", "-q"]).expect_status(0);
        before.assert_same(&world.snapshot());
    });
}

#[test]
fn every_way_to_write_is_refused() {
    every_identity(|world| {
        world.write("a", SENTINEL);
        world.write(
            "w.py",
            r#"import mmap, os, socket
os.chdir(os.path.dirname(os.path.abspath(__file__)))
fd = os.open("a", os.O_RDONLY)
ways = {
    "truncate": lambda: os.truncate("a", 0),
    "create": lambda: os.open("n1", os.O_CREAT | os.O_RDONLY),
    "tmpfile": lambda: os.open(".", os.O_TMPFILE | os.O_RDWR),
    "link": lambda: os.link("a", "n2"),
    "symlink": lambda: os.symlink("a", "n3"),
    "fifo": lambda: os.mkfifo("n4"),
    "node": lambda: os.mknod("n5"),
    "socket": lambda: socket.socket(socket.AF_UNIX).bind("n6"),
    "utime": lambda: os.utime("a", (1, 1)),
    "xattr": lambda: os.setxattr("a", "user.x", b"1"),
    "fchmod": lambda: os.fchmod(fd, 0o600),
    "reopen": lambda: os.open("/proc/self/fd/%d" % fd, os.O_WRONLY),
    "chown": lambda: os.chown("a", os.getuid(), os.getgid()),
    "mmap": lambda: mmap.mmap(os.open("a", os.O_RDWR), 10),
    "rename-in": lambda: (open("/tmp/t", "w").close(), os.rename("/tmp/t", "n7")),
}
for name, way in ways.items():
    try: way(); print("WROTE", name)
    except OSError as e: print(name, e.errno)
"#,
        );
        let before = world.snapshot();
        let output = read_only(world, &["/usr/bin/python3", "w.py"]);
        assert_eq!(output.status, 0, "{output}");
        assert!(!output.out().contains("WROTE") && output.out().lines().count() == 15, "{output}");
        before.assert_same(&world.snapshot());
    });
}
