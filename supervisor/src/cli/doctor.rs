//! `tollgate doctor`: what this machine lets a jail do, what lacks, what follows from it and how to get it.

use crate::{
    effect::RunId,
    jail::{
        cgroup::{CgroupEnvironment, Controller, Group, ScopeBounds},
        probe::{self, Answer, Probe},
    },
};
use clap::Args;
use serde::Serialize;
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

/// Checks what this machine offers, by trying it.
///
/// Ends with status 0 if a default run can work here, and 1 otherwise.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Make one probe in this process and print what came of it.
    #[arg(long, hide = true)]
    pub probe: Option<String>,
    /// The directory that the probe may use.
    #[arg(long, hide = true)]
    pub directory: Option<PathBuf>,
}

/// How well one thing works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// It works.
    Ok,
    /// A run works without it, with less.
    Limited,
    /// No default run works without it.
    Missing,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was tried.
    pub name: String,
    /// How well it works.
    pub status: Status,
    /// A version or place where it works, the failed call where it does not.
    pub detail: String,
    /// What follows for a run; empty where it works.
    pub consequence: String,
    /// What to do; empty where it works.
    pub remedy: String,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether a default run can work here.
    pub works: bool,
    /// The kernel's release.
    pub kernel: String,
    /// What was tried, in the order in which a jail needs it.
    pub findings: Vec<Finding>,
}

/// Runs the subcommand.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let directory = args.directory.clone().unwrap_or_else(state_ancestor);
    if let Some(name) = &args.probe {
        let Some(probe) = Probe::named(name) else {
            eprintln!("error: no probe is called `{name}`");
            return ExitCode::from(2);
        };
        println!("{}", json(&probe::perform(probe, &directory)));
        return ExitCode::SUCCESS;
    }
    let report = examine(&directory);
    if args.json {
        println!("{}", json(&report));
    } else {
        print!("{}", table(&report));
    }
    if report.works {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn json(value: &impl Serialize) -> String {
    // These types hold strings, booleans and numbers, so this cannot fail; an empty object is still JSON.
    serde_json::to_string(value).unwrap_or_else(|_| "{}".to_owned())
}

/// Tries everything.
fn examine(directory: &Path) -> Report {
    // The probes of what a default run needs, and what follows where one fails.
    const NEEDED: [(Probe, &str); 8] = [
        (Probe::UserNamespace, "no run starts: every jail begins with a user namespace"),
        (Probe::Namespaces, "no run starts: the jail cannot be separated from the host"),
        (Probe::Loopback, "no run starts: its network namespace has no loopback"),
        (Probe::Proc, "no run starts: the host's /proc is never shown instead"),
        (Probe::Landlock, "no run starts, unless its policy says best effort"),
        (Probe::Seccomp, "no run starts, unless its policy says best effort"),
        (Probe::Pidfd, "no run starts: processes could not be ended safely"),
        (Probe::Openat2, "no run starts: changes could not be applied safely"),
    ];
    let mut findings: Vec<Finding> =
        NEEDED.iter().map(|(probe, consequence)| tried(*probe, Status::Missing, consequence, directory)).collect();
    let mirror = "a run works on a copy of its workspace, which is slower to start in a large folder";
    findings.push(tried(Probe::Overlay, Status::Limited, mirror, directory));
    if nix::unistd::geteuid().is_root() {
        let consequence = "root's runs cannot show files of other users as the program's own";
        findings.push(tried(Probe::IdmappedMounts, Status::Limited, consequence, directory));
    }
    let consequence = "a run whose policy has a network is refused";
    findings.push(network_door(tried(Probe::NetworkDoor, Status::Limited, consequence, directory)));
    findings.push(groups());
    findings.push(shim());
    findings.push(bubblewrap());
    let works = findings.iter().all(|finding| finding.status != Status::Missing);
    let kernel = nix::sys::utsname::uname().map(|name| name.release().to_string_lossy().into_owned());
    Report { works, kernel: kernel.unwrap_or_default(), findings }
}

fn tried(probe: Probe, otherwise: Status, consequence: &str, directory: &Path) -> Finding {
    let name = probe.name().to_owned();
    match probe::ask(Path::new("/proc/self/exe"), &["doctor", "--probe"], probe, directory) {
        Answer::Works { detail } => works(name, detail),
        Answer::Fails { call, errno } => Finding {
            remedy: probe::explain(&name, errno),
            name,
            status: otherwise,
            detail: format!("{call}: {}", std::io::Error::from_raw_os_error(errno)),
            consequence: consequence.to_owned(),
        },
    }
}

/// The one thing that has a second way to work.
fn network_door(found: Finding) -> Finding {
    if found.detail != probe::NAMED_PORTS {
        return found;
    }
    Finding {
        remedy: probe::explain(&found.name, libc::EPROTONOSUPPORT),
        status: Status::Limited,
        consequence: "a run reaches only the ports that its policy names, and datagrams that it sends have no receipt"
            .to_owned(),
        ..found
    }
}

fn works(name: String, detail: String) -> Finding {
    Finding { name, status: Status::Ok, detail, consequence: String::new(), remedy: String::new() }
}

/// Makes a group and sets its limits, which proves more than permissions do.
fn groups() -> Finding {
    let name = "control groups".to_owned();
    let environment = CgroupEnvironment::detect();
    let run = RunId(format!("doctor{}", std::process::id()));
    let wanted = [Controller::Memory, Controller::Pids, Controller::Cpu, Controller::Accounting];
    let made = Group::unified(&environment, &run, &wanted).or_else(|_| Group::legacy(&environment, &run, &wanted));
    let mut why = match made {
        Ok(group) => match (group.limit_memory(64 << 20), group.limit_pids(64), group.limit_cpus(1.0)) {
            (Ok(_), Ok(()), Ok(())) => return works(name, format!("{}; {}", group.describe(), environment.describe())),
            (Err(why), _, _) | (_, Err(why), _) | (_, _, Err(why)) => why.to_string(),
        },
        Err(why) => why.to_string(),
    };
    if let Some(manager) = environment.systemd {
        let bounds = ScopeBounds { memory: Some(64 << 20), pids: Some(64), cpus: Some(1.0) };
        match Group::trial_scope(&environment, manager, &run, &bounds) {
            Ok(group) if wanted.iter().all(|one| group.has(*one)) => {
                return works(name, format!("{} for each run; {}", group.describe(), environment.describe()));
            }
            Ok(group) => {
                let lacking: Vec<&str> = wanted.iter().filter(|one| !group.has(**one)).map(|one| one.noun()).collect();
                why = format!("systemd makes a scope, and it does not hold {}", lacking.join(", "));
            }
            Err(refused) => why = refused.to_string(),
        }
    }
    let (consequence, remedy) = match environment.systemd {
        Some(_) => (
            "limits that only a control group can hold are refused where they are asked for, and else watched",
            "have root delegate the controllers: put `[Service]` and `Delegate=cpu memory pids` into \
             /etc/systemd/system/user@.service.d/delegate.conf, and log in again",
        ),
        None => (
            "`--memory` and `--cpus` are refused, and built-in memory limits are watched instead of capped; `--pids`, \
             `--wall` and `--cpu` hold",
            "run as a service with `Delegate=yes`, under `systemd-run --user --scope -p Delegate=yes`, or as root",
        ),
    };
    Finding {
        name,
        status: Status::Limited,
        detail: format!("{}; {why}", environment.describe()),
        consequence: consequence.to_owned(),
        remedy: remedy.to_owned(),
    }
}

fn shim() -> Finding {
    let name = "shim".to_owned();
    let beside = env::current_exe().ok().and_then(|path| Some(path.parent()?.join("tollgate-shim")));
    let found = env::var_os("TOLLGATE_SHIM").map(PathBuf::from).or(beside).unwrap_or_default();
    match version(&found) {
        Ok(version) => works(name, format!("{version} at {}", found.display())),
        Err(why) => Finding {
            name,
            status: Status::Missing,
            detail: format!("{}: {why}", found.display()),
            consequence: "no run starts: the shim builds the jail".to_owned(),
            remedy: "install `tollgate-shim` beside `tollgate`, or name it with `TOLLGATE_SHIM`".to_owned(),
        },
    }
}

fn bubblewrap() -> Finding {
    let name = "bubblewrap".to_owned();
    match version(Path::new("bwrap")) {
        Ok(version) => works(name, version),
        Err(why) => Finding {
            name,
            status: Status::Limited,
            detail: format!("bwrap: {why}"),
            consequence: "policies with `launcher = \"bwrap\"` are refused; the native launcher does not need it"
                .to_owned(),
            remedy: "install your distribution's `bubblewrap` package, if you want that launcher".to_owned(),
        },
    }
}

/// What a program prints for `--version`, in one line.
fn version(program: &Path) -> Result<String, String> {
    let output =
        Command::new(program).arg("--version").stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("`--version` ended with {}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().trim().to_owned())
}

/// The state directory, or its nearest ancestor that exists: what is mounted there must carry overlays.
fn state_ancestor() -> PathBuf {
    let of = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = of("TOLLGATE_STATE")
        .or_else(|| of("XDG_STATE_HOME").map(|base| base.join("tollgate")))
        .or_else(|| of("HOME").map(|home| home.join(".local/state/tollgate")))
        .unwrap_or_else(|| PathBuf::from("/var/lib/tollgate"));
    state.ancestors().find(|path| path.is_dir()).map_or_else(|| PathBuf::from("/"), Path::to_owned)
}

/// The report for a person: one aligned line each, and what to do below it.
fn table(report: &Report) -> String {
    let width = report.findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = format!("Linux {}\n", report.kernel);
    for finding in &report.findings {
        let status = match finding.status {
            Status::Ok => "ok",
            Status::Limited => "limited",
            Status::Missing => "missing",
        };
        let line = format!("{:width$}  {status:7}  {}", finding.name, finding.detail);
        text.push_str(line.trim_end());
        text.push('\n');
        if finding.status != Status::Ok {
            text.push_str(&format!("{:width$}           so: {}\n", "", finding.consequence));
            text.push_str(&format!("{:width$}           do: {}\n", "", finding.remedy));
        }
    }
    text.push_str(if report.works { "A default run can work here.\n" } else { "A default run cannot work here.\n" });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_to_do_only_where_something_lacks() {
        let bad = Finding {
            name: "proc".to_owned(),
            status: Status::Missing,
            detail: "mount(2): EPERM".to_owned(),
            consequence: "no run".to_owned(),
            remedy: "unmask".to_owned(),
        };
        let findings = vec![works("loopback".to_owned(), String::new()), bad];
        let text = table(&Report { works: false, kernel: "6.1".to_owned(), findings });
        let expected = "Linux 6.1\nloopback  ok\nproc      missing  mount(2): EPERM\n                   so: no run\n                   do: unmask\nA default run cannot work here.\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_network_by_named_ports_is_limited_and_says_what_would_be_better() {
        let found = network_door(works("network door".to_owned(), probe::NAMED_PORTS.to_owned()));
        assert_eq!(found.status, Status::Limited);
        assert!(found.remedy.contains("nf_tables") && found.consequence.contains("ports"), "{found:?}");
        let whole = works("network door".to_owned(), "nf_tables redirect".to_owned());
        assert_eq!(network_door(whole.clone()), whole);
    }

    #[test]
    fn a_shim_that_is_no_program_is_missing_with_its_path() {
        assert!(version(Path::new("/nonexistent/shim")).is_err());
        assert!(version(Path::new("/bin/false")).is_err());
    }
}
