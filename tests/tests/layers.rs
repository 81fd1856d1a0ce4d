//! Each layer of the jail is worth its place: with it an attack fails, and without it the same attack succeeds.
//!
//! The programs of these tests are built with the feature `test-switches`, into a target folder of their own, and obey
//! `TOLLGATE_TEST_WITHOUT`. Where two layers stop an attack, the other one is out in both halves of the proof.

use std::process::Command;
use tollgate_tests::{
    every_identity, every_way, switches, terminal::Terminal, world::SENTINEL, Finished, Invocation, Listener, World,
};

/// A command of `tollgate run` with the build that can leave layers out.
fn switchable(world: &World, command: &[&str]) -> Invocation {
    switches::tollgate(world, &[&["run", "--quiet", "--"], command].concat())
}

/// Runs a Python attack without these layers.
fn attack(world: &World, without: &str, program: &str) -> Finished {
    let mut invocation = switchable(world, &["/usr/bin/python3", "-c", program]);
    if !without.is_empty() {
        invocation = invocation.env("TOLLGATE_TEST_WITHOUT", without);
    }
    invocation.finish()
}

/// The proof: the attack prints `WON` without the layer, and does not with it. `others` are out in both halves.
#[track_caller]
fn proves(world: &World, layer: &str, others: &str, program: &str) {
    let with = attack(world, others, program);
    assert!(!with.out().contains("WON"), "the attack wins although `{layer}` is there: {with}");
    assert!(with.out().contains("END"), "the attack did not run with `{layer}`: {with}");
    let both = if others.is_empty() { layer.to_owned() } else { format!("{layer},{others}") };
    let without = attack(world, &both, program);
    assert!(
        without.out().contains("WON"),
        "the attack proves nothing of `{layer}`, it fails without it too: {without}"
    );
}

/// A Python attack: the body says what has to hold for a win; any OSError is a loss.
fn python(body: &str) -> String {
    format!(
        "import os, socket, ctypes, sys\nlibc = ctypes.CDLL(None, use_errno=True)\ndef won():\n{}\ntry:\n    print('WON' if won() else 'LOST')\nexcept OSError as e:\n    print('LOST', e)\nprint('END')\n",
        body.lines().map(|line| format!("    {line}\n")).collect::<String>()
    )
}

#[test]
fn landlock_keeps_signals_from_the_jails_first_process() {
    // Pid 1 has the same user and is in sight; only Landlock's signal scope is between.
    every_identity(|world| proves(world, "landlock", "", &python("os.kill(1, 0)\nreturn True")));
}

#[test]
fn seccomp_keeps_the_keyring_out_of_reach() {
    every_identity(|world| proves(world, "seccomp", "", &python("return libc.syscall(250, 0, -3, 1) >= 0")));
}

#[test]
fn seccomp_keeps_keystrokes_out_of_a_terminal() {
    let body = "import fcntl, pty\nmaster, slave = pty.openpty()\nchild = os.fork()\nif child == 0:\n    os.setsid()\n    \
        fcntl.ioctl(slave, 0x540E, 0)\n    try:\n        fcntl.ioctl(slave, 0x5412, b'x')\n    except OSError:\n        os._exit(1)\n    \
        os._exit(0)\nreturn os.waitpid(child, 0)[1] == 0";
    every_identity(|world| proves(world, "seccomp", "", &python(body)));
}

#[test]
fn capabilities_are_dropped_from_the_bounding_set_too() {
    let body =
        "return any(line.split()[1] != '0' * 16 for line in open('/proc/self/status') if line.startswith('CapBnd'))";
    every_identity(|world| proves(world, "capabilities", "", &python(body)));
}

#[test]
fn the_private_root_hides_the_hosts_files() {
    every_identity(|world| {
        let body = format!("return {SENTINEL:?} in open({:?}).read()", world.out.join("s").display().to_string());
        proves(world, "mounts", "landlock", &python(&body));
    });
}

#[test]
fn landlock_alone_would_hide_the_hosts_files() {
    // The other way round: with the private root out, Landlock still stands. A file that every Debian has, that anyone
    // may read, and that lies below nothing the view shows. Not one of /etc: that is one rule, because a private root's
    // /etc holds nothing but what the view shows.
    every_identity(|world| {
        let body = "return 'Package:' in open('/var/lib/dpkg/status').read()";
        proves(world, "landlock", "mounts", &python(body));
    });
}

#[test]
fn the_process_namespace_hides_the_hosts_processes() {
    every_identity(|world| {
        let mut sleeper = world.command("sleep").arg("60").into_command().spawn().expect("coreutils has `sleep`");
        // Not there at all, against there and perhaps not ours.
        let body = format!(
            "import errno\ntry:\n    os.kill({}, 0)\nexcept OSError as e:\n    return e.errno != errno.ESRCH\nreturn True",
            sleeper.id()
        );
        proves(world, "pid", "mounts,landlock", &python(&body));
        sleeper.kill().expect("our child");
        sleeper.wait().expect("our child");
    });
}

#[test]
fn the_network_namespace_hides_the_hosts_services() {
    every_identity(|world| {
        let (listener, port) = Listener::at_port();
        let body = format!("socket.create_connection(('127.0.0.1', {port}), 2)\nreturn True");
        let with = attack(world, "", &python(&body));
        assert!(!with.out().contains("WON"), "{with}");
        assert_eq!(listener.accepted(), 0);
        let without = attack(world, "network", &python(&body));
        assert!(without.out().contains("WON"), "{without}");
        assert_eq!(listener.accepted(), 1);
    });
}

#[test]
fn the_network_namespace_and_landlock_both_hide_abstract_sockets() {
    every_identity(|world| {
        let name = format!("tg-layer-{}", world.base().file_name().expect("named").to_string_lossy());
        let listener = Listener::at_name(&name);
        let body = format!("s = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')\nreturn True");
        for without in ["", "network", "landlock"] {
            let output = attack(world, without, &python(&body));
            assert!(!output.out().contains("WON"), "without `{without}`: {output}");
        }
        assert_eq!(listener.accepted(), 0);
        let output = attack(world, "network,landlock", &python(&body));
        assert!(output.out().contains("WON"), "{output}");
        assert_eq!(listener.accepted(), 1);
    });
}

#[test]
fn the_ipc_namespace_hides_the_hosts_shared_memory() {
    every_identity(|world| {
        let key = 0x7468_0000 | (std::process::id() & 0xffff);
        let make =
            format!("import ctypes,sys\nsys.exit(0 if ctypes.CDLL(None).shmget({key}, 4096, 0o1666) >= 0 else 1)");
        assert!(Command::new("python3").args(["-c", &make]).status().expect("the suite needs python3").success());
        proves(world, "ipc", "", &python(&format!("return libc.shmget({key}, 0, 0) >= 0")));
        let remove = format!("import ctypes\nc=ctypes.CDLL(None)\nc.shmctl(c.shmget({key}, 0, 0), 0, None)");
        assert!(Command::new("python3").args(["-c", &remove]).status().expect("the suite needs python3").success());
    });
}

#[test]
fn closing_descriptors_keeps_the_callers_open_files_out() {
    every_identity(|world| {
        let body = python("return any(int(n) > 2 and os.path.exists('/proc/self/fd/' + n) and int(n) == 9 for n in os.listdir('/proc/self/fd'))");
        let holder =
            "import os,sys\nos.dup2(os.open(sys.argv[1], os.O_RDONLY), 9, True)\nos.execvp(sys.argv[2], sys.argv[2:])";
        let held = |without: &str| {
            let inner = switchable(world, &["/usr/bin/python3", "-c", &body]).into_command();
            let mut invocation = world
                .command("/usr/bin/python3")
                .arg("-c")
                .arg(holder)
                .arg(world.out.join("s"))
                .arg(inner.get_program());
            if !without.is_empty() {
                invocation = invocation.env("TOLLGATE_TEST_WITHOUT", without);
            }
            for argument in inner.get_args() {
                invocation = invocation.arg(argument);
            }
            invocation.finish()
        };
        let with = held("");
        assert!(with.out().contains("END") && !with.out().contains("WON"), "{with}");
        let without = held("descriptors");
        assert!(without.out().contains("WON"), "{without}");
    });
}

#[test]
fn resource_limits_forbid_core_dumps() {
    every_identity(|world| {
        let (_, hard) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_CORE).expect("we may ask");
        assert_ne!(hard, 0, "this suite's own limit forbids core dumps, so nothing can be told apart");
        proves(
            world,
            "rlimits",
            "",
            &python("import resource\nreturn resource.getrlimit(resource.RLIMIT_CORE)[1] != 0"),
        );
    });
}

#[test]
fn the_list_of_variables_keeps_the_callers_secrets_out() {
    every_identity(|world| {
        let seen = |without: &str| {
            let program = python("return 'zq9-secret' in os.environ.get('FORGE_TOKEN', '')");
            let invocation = switchable(world, &["/usr/bin/python3", "-c", &program]).env("FORGE_TOKEN", "zq9-secret");
            match without {
                "" => invocation.finish(),
                layer => invocation.env("TOLLGATE_TEST_WITHOUT", layer).finish(),
            }
        };
        let with = seen("");
        assert!(with.out().contains("END") && !with.out().contains("WON"), "{with}");
        let without = seen("environment");
        assert!(without.out().contains("WON"), "{without}");
    });
}

#[test]
fn a_terminal_of_its_own_keeps_the_callers_out_of_reach() {
    // Any process may change the size of a terminal that it has a descriptor of.
    every_identity(|world| {
        let after = |without: &str| {
            let mut invocation = switchable(world, &["/bin/stty", "rows", "7", "cols", "9"]);
            if !without.is_empty() {
                invocation = invocation.env("TOLLGATE_TEST_WITHOUT", without);
            }
            let (terminal, status) = Terminal::start(world, invocation, 24, 80).ended();
            assert_eq!(status, 0, "{}", terminal.screen());
            terminal.size()
        };
        assert_eq!(after(""), "24 80");
        assert_eq!(after("terminal"), "7 9");
    });
}

#[test]
fn the_shim_of_a_release_refuses_to_leave_anything_out() {
    every_way(|world| {
        for layer in ["seccomp", "landlock", "mounts", "environment", "terminal"] {
            let output = world.run(["--", "sh", "-c", "echo ran"]).env("TOLLGATE_TEST_WITHOUT", layer).finish();
            assert_eq!(output.status, 125, "{layer}: {output}");
            assert!(output.out().is_empty(), "{layer}: {output}");
        }
        let nonsense = world.run(["--", "sh", "-c", "echo ran"]).env("TOLLGATE_TEST_WITHOUT", "no-such-layer").finish();
        assert_eq!((nonsense.status, nonsense.out().as_str()), (125, ""), "{nonsense}");
    });
}
