//! `tollgate doctor` by doing: this program is itself the `tollgate doctor` that the probes start again.

use clap::{Args, FromArgMatches};
use std::{
    os::unix::process::CommandExt,
    process::{Command, ExitCode, Output},
};
use tollgate::cli::doctor::{self, DoctorArgs};

fn main() -> ExitCode {
    let mut words: Vec<_> = std::env::args_os().collect();
    if words.get(1).is_some_and(|word| word == "doctor") {
        words.remove(1);
        let matches = DoctorArgs::augment_args(clap::Command::new("doctor")).get_matches_from(words);
        return doctor::run(&DoctorArgs::from_arg_matches(&matches).expect("parsed by its own definition"));
    }
    here_the_report_is_one_json_object_of_known_names();
    an_ordinary_user_needs_no_privilege_for_any_of_it();
    without_user_namespaces_the_cause_and_its_command_are_named();
    with_a_masked_proc_the_narrow_option_is_named();
    println!("doctor: ok");
    ExitCode::SUCCESS
}

/// Runs a shell script in a user namespace of its own in which `$0` is this program.
fn enclosed(flags: &[&str], script: &str) -> Output {
    let program = std::env::current_exe().expect("our own path");
    let shim = ["TOLLGATE_SHIM", "/bin/true"];
    Command::new("unshare")
        .args(flags)
        .args(["sh", "-c", script])
        .arg(program)
        .env(shim[0], shim[1])
        .output()
        .expect("unshare(1) starts")
}

fn finding(output: &Output, name: &str) -> serde_json::Value {
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    let found = report["findings"].as_array().expect("a list").iter().find(|finding| finding["name"] == name);
    found.unwrap_or_else(|| panic!("no finding `{name}` in {report}")).clone()
}

fn here_the_report_is_one_json_object_of_known_names() {
    let output = enclosed(&["-Ur"], "exec \"$0\" doctor --json");
    for name in ["user namespace", "namespaces", "loopback", "proc", "pidfd", "openat2"] {
        let finding = finding(&output, name);
        assert_eq!(finding["status"], "ok", "{finding}");
    }
}

fn an_ordinary_user_needs_no_privilege_for_any_of_it() {
    let mut command = Command::new(std::env::current_exe().expect("our own path"));
    command.args(["doctor", "--json"]).env("TOLLGATE_SHIM", "/bin/true");
    if nix::unistd::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let output = command.output().expect("it starts");
    for name in ["user namespace", "namespaces", "loopback", "proc", "landlock", "seccomp"] {
        let finding = finding(&output, name);
        assert_eq!(finding["status"], "ok", "{finding}");
    }
}

fn without_user_namespaces_the_cause_and_its_command_are_named() {
    let output = enclosed(&["-Ur"], "echo 0 > /proc/sys/user/max_user_namespaces; exec \"$0\" doctor --json");
    assert_eq!(output.status.code(), Some(1));
    let finding = finding(&output, "user namespace");
    assert_eq!(finding["status"], "missing");
    let remedy = finding["remedy"].as_str().expect("text");
    assert!(remedy.contains("sysctl -w user.max_user_namespaces="), "{remedy}");
}

fn with_a_masked_proc_the_narrow_option_is_named() {
    let script = "mount --bind /dev/null /proc/cmdline; exec \"$0\" doctor --json";
    let output = enclosed(&["-Urpfm", "--mount-proc"], script);
    assert_eq!(output.status.code(), Some(1));
    let finding = finding(&output, "proc");
    assert_eq!(finding["status"], "missing");
    let remedy = finding["remedy"].as_str().expect("text");
    assert!(remedy.contains("/proc/cmdline") && remedy.contains("systempaths=unconfined"), "{remedy}");
}
