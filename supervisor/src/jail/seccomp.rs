//! The list of system calls, from its JSON text to the filters that the shim installs.
//!
//! The list names what a program may call, with a reason for each; everything else goes to the shim, which refuses it
//! and tells, so that a refusal has a receipt. Three parts:
//!
//! - `allow`: calls that pass, some only with certain arguments;
//! - `refuse`: calls, or arguments of allowed calls, that get an error number at once;
//! - `observe`: calls that pass after the shim has looked at their path or address. Looking is for the receipt alone.
//!   What a program can reach is decided by mounts and Landlock, because a path in the program's memory can change
//!   between the look and the call (seccomp_unotify(2), "Design goals").
//!
//! The kernel lets the strictest filter win, an error number over a notification over passing (seccomp(2)). So each
//! error number has a filter of its own, and one more listens for the rest. It is installed last, so that installing
//! the others is not watched.

pub mod calls;

use crate::policy::fault::{closest, suggest};
use seccompiler::{
    sock_filter, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use tollgate_shim::protocol::Filter;

/// What the shim answers to a call that is in no part of the list.
///
/// EPERM and not ENOSYS: a program that is told that a call does not exist tries another way, often quietly, and the
/// refusal would look like a missing feature. Calls that we do not even know get ENOSYS, from the filter itself.
pub const REFUSED_WITH: i32 = libc::EPERM;

/// Which calls the shim is to look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchLevel {
    /// All that the list observes.
    Everything,
    /// Those that could change something; not those whose arguments show that they only read.
    Writes,
    /// None: what the list observes passes without a look.
    Nothing,
}

/// An architecture whose numbers we know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// x86-64, without its x32 numbers.
    X86_64,
    /// aarch64.
    Aarch64,
}

impl Architecture {
    /// The one that this program runs on.
    #[cfg(target_arch = "x86_64")]
    pub const RUNNING: Architecture = Architecture::X86_64;
    /// The one that this program runs on.
    #[cfg(target_arch = "aarch64")]
    pub const RUNNING: Architecture = Architecture::Aarch64;
}

/// A list, compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The filters, in the order in which they are to be installed; the last one listens.
    pub filters: Vec<Filter>,
    /// Numbers of calls that the shim lets through after a look, sorted.
    pub observed: Vec<i64>,
}

/// What is wrong with a list of system calls.
#[derive(Debug, thiserror::Error)]
pub enum SeccompError {
    /// Not the JSON that a list is.
    #[error("the list of system calls is not what it should be: {0}")]
    Json(#[from] serde_json::Error),
    /// No architecture has a call of this name.
    #[error("no system call is named `{name}`{}", suggest(*.suggestion))]
    UnknownCall {
        /// The name in the list.
        name: String,
        /// The closest that exists.
        suggestion: Option<&'static str>,
    },
    /// The entry says nothing about why it is there.
    #[error("the entry for `{call}` has no reason; every call can say why it is listed")]
    NoReason {
        /// The entry's first call.
        call: String,
    },
    /// Both allowed and observed, or allowed twice: one of the two would count for nothing.
    #[error("`{call}` is listed twice, and only one of the entries could count")]
    Twice {
        /// The call.
        call: String,
    },
    /// A condition that cannot be compared.
    #[error("the condition of `{call}` on argument {argument}: {problem}")]
    Condition {
        /// The call.
        call: String,
        /// The argument, from 0.
        argument: u8,
        /// What is wrong.
        problem: &'static str,
    },
    /// An error number that a refusal cannot have.
    #[error("`{name}` is no error number of a refusal; allowed: {}", errno_names())]
    UnknownErrno {
        /// As it is written.
        name: String,
    },
    /// The compiler's own complaint.
    #[error("the list of system calls does not compile: {0}")]
    Compiler(#[from] seccompiler::BackendError),
    /// The compiler made a program that we do not understand. A bug of ours: please report it.
    #[error(
        "the compiled list has {found} instructions that refuse where {expected} were expected; please report this"
    )]
    Unexpected {
        /// How many were found.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
}

/// Compiles a list for the machine that this program runs on.
///
/// # Errors
///
/// Whatever keeps the list from meaning exactly one thing. Nothing is left out quietly; a call that only the other
/// architecture has is no error.
pub fn compile(source: &str, watch: WatchLevel) -> Result<Compiled, SeccompError> {
    compile_for(source, watch, Architecture::RUNNING)
}

/// As [`compile`], for either architecture.
///
/// # Errors
///
/// As [`compile`].
pub fn compile_for(source: &str, watch: WatchLevel, machine: Architecture) -> Result<Compiled, SeccompError> {
    let list: List = serde_json::from_str(source)?;
    let mut chains = Chains { machine, by_number: BTreeMap::new() };
    for entry in &list.allow {
        check_reason(&entry.calls, &entry.why)?;
        for call in &entry.calls {
            chains.add(call, entry.when.as_deref())?;
        }
    }
    let observed = observe(&list.observe, watch, &mut chains)?;
    let mut filters = refusals(&list.refuse, machine)?;
    filters.push(listener(chains.by_number, machine)?);
    Ok(Compiled { filters, observed: observed.into_iter().collect() })
}

/// The number of a call on this machine; none where it has no such call.
pub fn syscall_number(name: &str) -> Option<i64> {
    calls::number(name, Architecture::RUNNING)
}

/// The name of a number on this machine.
pub fn syscall_name(number: i64) -> Option<&'static str> {
    calls::name(number, Architecture::RUNNING)
}

/// The list as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    /// For people; not used.
    #[serde(rename = "about")]
    _about: Vec<String>,
    allow: Vec<Allow>,
    refuse: Vec<Refuse>,
    observe: Vec<Observe>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Allow {
    calls: Vec<String>,
    why: String,
    /// All must hold. Two entries of one call are alternatives.
    when: Option<Vec<Condition>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refuse {
    calls: Vec<String>,
    errno: String,
    why: String,
    /// All must hold; without it, the call is refused whatever its arguments are.
    when: Option<Vec<Condition>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Observe {
    calls: Vec<String>,
    why: String,
    /// Where all hold, the call concerns no path and is not looked at.
    skip: Option<Vec<Condition>>,
    /// Where all hold, the call only reads, and is not looked at when only writes are watched.
    reads: Option<Vec<Condition>>,
}

/// A comparison of one argument.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    /// Which, from 0.
    arg: u8,
    /// How many bits the kernel itself looks at, 32 or 64. It must be written out: compared too wide, a refusal is
    /// passed by with a high bit that the kernel ignores; compared too narrow, an allowed value can carry more.
    width: u8,
    op: Comparison,
    value: Number,
    /// Only with `eq`: the bits that are compared.
    mask: Option<Number>,
    /// What the numbers are called in C; for people.
    #[serde(rename = "means")]
    _means: String,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Comparison {
    Eq,
    Ne,
}

/// A number, or one in hexadecimal as text, which JSON itself lacks.
#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Decimal(u64),
    Text(String),
}

impl Number {
    fn value(&self) -> Option<u64> {
        match self {
            Number::Decimal(value) => Some(*value),
            Number::Text(text) => u64::from_str_radix(text.strip_prefix("0x")?, 16).ok(),
        }
    }
}

fn check_reason(calls: &[String], why: &str) -> Result<(), SeccompError> {
    match why.trim().is_empty() {
        true => Err(SeccompError::NoReason { call: calls.first().cloned().unwrap_or_default() }),
        false => Ok(()),
    }
}

/// What passes, by number: no rule is every argument.
struct Chains {
    machine: Architecture,
    by_number: BTreeMap<i64, Vec<SeccompRule>>,
}

impl Chains {
    fn add(&mut self, call: &str, when: Option<&[Condition]>) -> Result<(), SeccompError> {
        let Some(number) = look_up(call, self.machine)? else { return Ok(()) };
        let rule = when.map(|conditions| rule(call, conditions)).transpose()?;
        match (self.by_number.get_mut(&number), rule) {
            (None, rule) => {
                self.by_number.insert(number, rule.into_iter().collect());
            }
            (Some(rules), Some(rule)) if !rules.is_empty() => rules.push(rule),
            (Some(_), _) => return Err(SeccompError::Twice { call: call.to_owned() }),
        }
        Ok(())
    }
}

fn look_up(call: &str, machine: Architecture) -> Result<Option<i64>, SeccompError> {
    match calls::is_known(call) {
        true => Ok(calls::number(call, machine)),
        false => Err(SeccompError::UnknownCall { name: call.to_owned(), suggestion: closest(call, calls::names()) }),
    }
}

/// Adds what passes without a look, and gives the numbers of what is looked at.
fn observe(list: &[Observe], watch: WatchLevel, chains: &mut Chains) -> Result<BTreeSet<i64>, SeccompError> {
    let mut observed = BTreeSet::new();
    for entry in list {
        check_reason(&entry.calls, &entry.why)?;
        for call in &entry.calls {
            let Some(number) = look_up(call, chains.machine)? else { continue };
            if chains.by_number.contains_key(&number) || !observed.insert(number) {
                return Err(SeccompError::Twice { call: call.clone() });
            }
            if watch == WatchLevel::Nothing {
                observed.remove(&number);
                chains.add(call, None)?;
                continue;
            }
            if let Some(skip) = &entry.skip {
                chains.add(call, Some(skip))?;
            }
            if let (Some(reads), WatchLevel::Writes) = (&entry.reads, watch) {
                chains.add(call, Some(reads))?;
            }
        }
    }
    Ok(observed)
}

fn rule(call: &str, conditions: &[Condition]) -> Result<SeccompRule, SeccompError> {
    let wrong = |condition: &Condition, problem| SeccompError::Condition {
        call: call.to_owned(),
        argument: condition.arg,
        problem,
    };
    let mut compiled = Vec::with_capacity(conditions.len());
    for condition in conditions {
        let not_a_number = || wrong(condition, "a number is written 5 or \"0x5\"");
        let value = condition.value.value().ok_or_else(not_a_number)?;
        let mask = condition.mask.as_ref().map(|mask| mask.value().ok_or_else(not_a_number)).transpose()?;
        let (width, largest) = match condition.width {
            32 => (SeccompCmpArgLen::Dword, u64::from(u32::MAX)),
            64 => (SeccompCmpArgLen::Qword, u64::MAX),
            _ => return Err(wrong(condition, "the width is 32 or 64 bits")),
        };
        if value > largest || mask.is_some_and(|mask| mask > largest) {
            return Err(wrong(condition, "the number is wider than the argument"));
        }
        let op = match (condition.op, mask) {
            (Comparison::Eq, None) => SeccompCmpOp::Eq,
            (Comparison::Ne, None) => SeccompCmpOp::Ne,
            (Comparison::Eq, Some(mask)) if value & !mask == 0 => SeccompCmpOp::MaskedEq(mask),
            (Comparison::Eq, Some(_)) => return Err(wrong(condition, "the value has bits outside the mask")),
            (Comparison::Ne, Some(_)) => return Err(wrong(condition, "a mask goes with `eq` only")),
        };
        compiled.push(SeccompCondition::new(condition.arg, width, op, value)?);
    }
    Ok(SeccompRule::new(compiled)?)
}

/// The filters that refuse at once, one for each error number.
fn refusals(list: &[Refuse], machine: Architecture) -> Result<Vec<Filter>, SeccompError> {
    let mut by_errno: BTreeMap<i32, Chains> = BTreeMap::new();
    for entry in list {
        check_reason(&entry.calls, &entry.why)?;
        let errno = errno(&entry.errno)?;
        let chains = by_errno.entry(errno).or_insert_with(|| Chains { machine, by_number: BTreeMap::new() });
        for call in &entry.calls {
            chains.add(call, entry.when.as_deref())?;
        }
    }
    by_errno
        .into_iter()
        .map(|(errno, chains)| {
            let refuse = SeccompAction::Errno(errno.unsigned_abs());
            let program = program(chains.by_number, SeccompAction::Allow, refuse, machine)?;
            Ok(Filter { instructions: program.iter().map(encode).collect(), listener: false })
        })
        .collect()
}

const ERRNOS: &[(&str, i32)] = &[
    ("EPERM", libc::EPERM),
    ("EACCES", libc::EACCES),
    ("EINVAL", libc::EINVAL),
    ("ENOSYS", libc::ENOSYS),
    ("EAFNOSUPPORT", libc::EAFNOSUPPORT),
    ("EPROTONOSUPPORT", libc::EPROTONOSUPPORT),
];

fn errno(name: &str) -> Result<i32, SeccompError> {
    let found = ERRNOS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    found.ok_or_else(|| SeccompError::UnknownErrno { name: name.to_owned() })
}

fn errno_names() -> String {
    ERRNOS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// What stands for a notification until it is rewritten: the compiler knows no such action. Any 16 bits do, as nothing
/// else in the program returns `SECCOMP_RET_TRACE`.
const STAND_IN: u32 = 0x7467;

/// The filter that sends everything that does not pass to the shim.
fn listener(chains: BTreeMap<i64, Vec<SeccompRule>>, machine: Architecture) -> Result<Filter, SeccompError> {
    // Every chain ends in the action for a mismatch, and so does the program.
    let expected = chains.len() + 1;
    let expected = if chains.is_empty() { 1 } else { expected };
    let mut program = program(chains, SeccompAction::Trace(STAND_IN), SeccompAction::Allow, machine)?;
    let mut found = 0;
    for instruction in &mut program {
        if instruction.code == RETURN && instruction.k == libc::SECCOMP_RET_TRACE | STAND_IN {
            instruction.k = libc::SECCOMP_RET_USER_NOTIF;
            found += 1;
        }
    }
    let understood =
        |k| matches!(k, libc::SECCOMP_RET_USER_NOTIF | libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_KILL_PROCESS);
    let strange = program.iter().filter(|instruction| instruction.code == RETURN && !understood(instruction.k)).count();
    if found != expected || strange > 0 {
        return Err(SeccompError::Unexpected { found: found + strange, expected });
    }
    // A call that the table does not know does not exist, for us as for an old kernel; libraries ask for new calls and
    // fall back. The x32 numbers (bit 30) are beyond the table as well. Jumps are relative, so the check can go in
    // between the architecture's, which is three instructions, and the rest.
    let enosys = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let unknown = [
        sock_filter { code: LOAD, jt: 0, jf: 0, k: NUMBER_OFFSET },
        sock_filter { code: JUMP_GREATER_OR_EQUAL, jt: 0, jf: 1, k: calls::FIRST_UNKNOWN },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: enosys },
    ];
    program.splice(ARCHITECTURE_CHECK..ARCHITECTURE_CHECK, unknown);
    Ok(Filter { instructions: program.iter().map(encode).collect(), listener: true })
}

/// Instructions of the check of the architecture, with which every compiled program begins.
const ARCHITECTURE_CHECK: usize = 3;

/// Offset of `nr` in `struct seccomp_data` (linux/seccomp.h).
const NUMBER_OFFSET: u32 = 0;

// Instructions of classic BPF (linux/bpf_common.h).
const RETURN: u16 = 0x06;
const LOAD: u16 = 0x20;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    mismatch: SeccompAction,
    matched: SeccompAction,
    machine: Architecture,
) -> Result<BpfProgram, SeccompError> {
    let target = match machine {
        Architecture::X86_64 => TargetArch::x86_64,
        Architecture::Aarch64 => TargetArch::aarch64,
    };
    Ok(SeccompFilter::new(rules, mismatch, matched, target)?.try_into()?)
}

/// A `struct sock_filter` as a little-endian 64-bit number.
fn encode(instruction: &sock_filter) -> u64 {
    let sock_filter { code, jt, jf, k } = *instruction;
    u64::from(code) | u64::from(jt) << 16 | u64::from(jf) << 24 | u64::from(k) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const DEFAULT: &str = include_str!("../../../policies/seccomp/default.json");
    const BOTH: [Architecture; 2] = [Architecture::X86_64, Architecture::Aarch64];

    /// `struct seccomp_data` (linux/seccomp.h), without the instruction pointer's value.
    struct Call {
        number: u32,
        architecture: u32,
        arguments: [u64; 6],
    }

    /// AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 (linux/audit.h): the ELF machine, 64 bits, little endian.
    fn audit(machine: Architecture) -> u32 {
        match machine {
            Architecture::X86_64 => 0xc000_003e,
            Architecture::Aarch64 => 0xc000_00b7,
        }
    }

    /// Runs a filter as the kernel does. It knows the instructions that filters are made of, and no others.
    fn run(filter: &Filter, call: &Call) -> u32 {
        let mut data = Vec::new();
        data.extend(call.number.to_le_bytes());
        data.extend(call.architecture.to_le_bytes());
        data.extend(0u64.to_le_bytes());
        call.arguments.iter().for_each(|argument| data.extend(argument.to_le_bytes()));
        let (mut accumulator, mut place) = (0u32, 0usize);
        loop {
            let instruction = filter.instructions[place].to_le_bytes();
            let code = u16::from_le_bytes([instruction[0], instruction[1]]);
            let (jump_true, jump_false) = (usize::from(instruction[2]), usize::from(instruction[3]));
            let k = u32::from_le_bytes(instruction[4..].try_into().unwrap());
            place += 1;
            let mut branch = |holds: bool| place += if holds { jump_true } else { jump_false };
            match code {
                0x20 => accumulator = u32::from_le_bytes(data[k as usize..k as usize + 4].try_into().unwrap()),
                0x54 => accumulator &= k,
                0x05 => place += k as usize,
                0x15 => branch(accumulator == k),
                0x25 => branch(accumulator > k),
                0x35 => branch(accumulator >= k),
                0x06 => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[derive(Debug, PartialEq, Eq, Clone, Copy)]
    enum Verdict {
        Pass,
        Notify,
        Refuse(i32),
        Kill,
    }

    /// What the kernel does after all filters: the strictest action wins (seccomp(2)).
    fn decide(compiled: &Compiled, call: &Call) -> Verdict {
        let action = |filter| match run(filter, call) {
            libc::SECCOMP_RET_ALLOW => Verdict::Pass,
            libc::SECCOMP_RET_USER_NOTIF => Verdict::Notify,
            libc::SECCOMP_RET_KILL_PROCESS => Verdict::Kill,
            errno if errno & 0xffff_0000 == libc::SECCOMP_RET_ERRNO => Verdict::Refuse((errno & 0xffff) as i32),
            other => panic!("action {other:#x}"),
        };
        let strictness = |verdict: &Verdict| match verdict {
            Verdict::Kill => 0,
            Verdict::Refuse(_) => 1,
            Verdict::Notify => 2,
            Verdict::Pass => 3,
        };
        compiled.filters.iter().map(action).min_by_key(strictness).unwrap()
    }

    fn verdict(compiled: &Compiled, machine: Architecture, name: &str, arguments: &[u64]) -> Option<Verdict> {
        let mut six = [0; 6];
        six[..arguments.len()].copy_from_slice(arguments);
        let number = calls::number(name, machine)? as u32;
        Some(decide(compiled, &Call { number, architecture: audit(machine), arguments: six }))
    }

    fn default_list(watch: WatchLevel, machine: Architecture) -> Compiled {
        compile_for(DEFAULT, watch, machine).unwrap()
    }

    #[test]
    fn each_allowed_call_passes_and_its_nearest_neighbour_does_not() {
        use Verdict::{Notify, Pass, Refuse};
        const HIGH: u64 = 1 << 32;
        let (eperm, enosys) = (Refuse(libc::EPERM), Refuse(libc::ENOSYS));
        let (family, protocol) = (Refuse(libc::EAFNOSUPPORT), Refuse(libc::EPROTONOSUPPORT));
        let table: &[(&str, &[u64], Verdict)] = &[
            ("read", &[0, 0, 1], Pass),
            ("clone", &[0x3d0f00], Pass),
            ("clone", &[0x1200011], Pass),
            ("clone", &[0x1000_0000 | 17], Notify),
            ("clone", &[0x0002_0000], Notify),
            ("clone", &[0x4000_0000], Notify),
            ("clone", &[0x0200_0000], Notify),
            ("clone", &[HIGH | 0x1000_0000], Notify),
            ("clone3", &[], enosys),
            ("unshare", &[0x200], Pass),
            ("unshare", &[0x1000_0000], Notify),
            ("unshare", &[0x80], Notify),
            ("setns", &[], Notify),
            ("mount", &[], Notify),
            ("open_tree", &[], Notify),
            ("mount_setattr", &[], Notify),
            ("pivot_root", &[], Notify),
            ("chroot", &[], Notify),
            ("bpf", &[], Notify),
            ("perf_event_open", &[], Notify),
            ("userfaultfd", &[], Notify),
            ("io_uring_setup", &[], Notify),
            ("keyctl", &[], Notify),
            ("ptrace", &[], Notify),
            ("process_vm_writev", &[], Notify),
            ("open_by_handle_at", &[], Notify),
            ("settimeofday", &[], Notify),
            ("ioctl", &[0, 0x5401], Pass),
            ("ioctl", &[0, 0x5412], eperm),
            ("ioctl", &[0, HIGH | 0x5412], eperm),
            ("ioctl", &[0, 0x541c], eperm),
            ("ioctl", &[0, 0xffff_ffff_0000_541c], eperm),
            ("ioctl", &[0, 0x5413], Pass),
            ("socket", &[1, 1, 0], Pass),
            ("socket", &[1, 0x80002, 0], Pass),
            ("socket", &[2, 1, 0], Pass),
            ("socket", &[2, 0x80801, 6], Pass),
            ("socket", &[10, 2, 17], Pass),
            ("socket", &[2, 2, 1], Pass),
            ("socket", &[10, 1, 262], Pass),
            ("socket", &[2, 1, 132], protocol),
            ("socket", &[16, 3, 0], Pass),
            ("socket", &[16, 0x80003, 9], family),
            ("socket", &[17, 3, 0], family),
            ("socket", &[HIGH | 17, 3, 0], family),
            ("socket", &[40, 1, 0], family),
            ("socket", &[2, 3, 6], eperm),
            ("socket", &[2, 0x80003, 6], eperm),
            ("socket", &[10, 0x803, 58], eperm),
            ("socket", &[2, 10, 0], eperm),
            ("socketpair", &[1, 1, 0], Pass),
            ("socketpair", &[30, 1, 0], family),
            ("personality", &[0], Pass),
            ("personality", &[0xffff_ffff], Pass),
            ("personality", &[0x4_0000], Pass),
            ("personality", &[8], Notify),
            ("personality", &[0x40_0000], Notify),
            ("utimensat", &[3, 0, 0], Pass),
            ("utimensat", &[3, 0x1000, 0], Notify),
            ("utimensat", &[3, HIGH, 0], Notify),
            ("openat", &[0, 0, 0], Notify),
            ("execve", &[], Notify),
            ("connect", &[], Notify),
        ];
        for machine in BOTH {
            let compiled = default_list(WatchLevel::Everything, machine);
            for (name, arguments, expected) in table {
                let found = verdict(&compiled, machine, name, arguments);
                assert_eq!(found, Some(*expected), "{name} {arguments:x?} on {machine:?}");
            }
        }
    }

    #[test]
    fn watching_writes_passes_opens_that_only_read() {
        use Verdict::{Notify, Pass};
        for machine in BOTH {
            let compiled = default_list(WatchLevel::Writes, machine);
            // O_RDONLY, O_CLOEXEC; then O_WRONLY, O_RDWR, O_CREAT, O_TRUNC alone (asm-generic/fcntl.h).
            for (flags, expected) in
                [(0, Pass), (0o2000000, Pass), (1, Notify), (2, Notify), (0o100, Notify), (0o1000, Notify)]
            {
                assert_eq!(verdict(&compiled, machine, "openat", &[0, 0, flags]), Some(expected), "{flags:o}");
            }
            assert_eq!(verdict(&compiled, machine, "openat2", &[]), Some(Notify));
            assert_eq!(verdict(&compiled, machine, "renameat2", &[]), Some(Notify));
            assert!(compiled.observed.contains(&calls::number("openat", machine).unwrap()));
        }
    }

    #[test]
    fn watching_nothing_passes_every_observed_call_and_still_refuses_the_rest() {
        for machine in BOTH {
            let compiled = default_list(WatchLevel::Nothing, machine);
            assert_eq!(compiled.observed, Vec::<i64>::new());
            for name in ["openat", "execve", "renameat2", "utimensat", "connect"] {
                assert_eq!(verdict(&compiled, machine, name, &[0, 1, 0xffff]), Some(Verdict::Pass), "{name}");
            }
            assert_eq!(verdict(&compiled, machine, "mount", &[]), Some(Verdict::Notify));
        }
    }

    #[test]
    fn every_number_passes_is_sent_or_does_not_exist() {
        for machine in BOTH {
            let compiled = default_list(WatchLevel::Everything, machine);
            let observed: HashSet<i64> = compiled.observed.iter().copied().collect();
            for number in (0..1024).chain(0x4000_0000..0x4000_0400).chain([u32::MAX]) {
                let call = Call { number, architecture: audit(machine), arguments: [0; 6] };
                let found = decide(&compiled, &call);
                if number >= calls::FIRST_UNKNOWN {
                    assert_eq!(found, Verdict::Refuse(libc::ENOSYS), "{number:#x}");
                } else if calls::name(i64::from(number), machine).is_none() {
                    assert_eq!(found, Verdict::Notify, "{number}");
                } else if observed.contains(&i64::from(number)) {
                    assert!(matches!(found, Verdict::Notify | Verdict::Pass), "{number}");
                } else {
                    assert_ne!(found, Verdict::Kill, "{number}");
                }
            }
        }
    }

    #[test]
    fn another_architecture_is_killed() {
        const I386: u32 = 0x4000_0003;
        let compiled = default_list(WatchLevel::Everything, Architecture::X86_64);
        let call = Call { number: 3, architecture: I386, arguments: [0; 6] };
        assert_eq!(decide(&compiled, &call), Verdict::Kill);
    }

    #[test]
    fn only_the_last_filter_listens_and_all_fit_the_kernel() {
        for machine in BOTH {
            for watch in [WatchLevel::Everything, WatchLevel::Writes, WatchLevel::Nothing] {
                let filters = default_list(watch, machine).filters;
                let listening: Vec<bool> = filters.iter().map(|filter| filter.listener).collect();
                assert_eq!(listening.iter().filter(|listens| **listens).count(), 1);
                assert_eq!(listening.last(), Some(&true));
                // BPF_MAXINSNS (linux/bpf_common.h).
                assert!(filters.iter().all(|filter| filter.instructions.len() <= 4096));
            }
        }
    }

    fn error(list: &str) -> String {
        compile(list, WatchLevel::Everything).unwrap_err().to_string()
    }

    #[test]
    fn a_list_that_is_not_clear_is_refused() {
        let list = |allow: &str, refuse: &str| {
            format!(r#"{{"about": [], "allow": [{allow}], "refuse": [{refuse}], "observe": []}}"#)
        };
        let table = [
            (list(r#"{"calls": ["raed"], "why": "x"}"#, ""), "no system call is named `raed`; did you mean `read`?"),
            (list(r#"{"calls": ["read"], "why": " "}"#, ""), "the entry for `read` has no reason"),
            (list(r#"{"calls": ["read", "read"], "why": "x"}"#, ""), "`read` is listed twice"),
            (list("", r#"{"calls": ["read"], "why": "x", "errno": "EBADF"}"#), "`EBADF` is no error number"),
            (list(r#"{"calls": ["read"], "why": "x", "when": []}"#, ""), "does not compile"),
            (
                list(
                    r#"{"calls": ["read"], "why": "x", "when":
                        [{"arg": 0, "width": 32, "op": "eq", "value": "0x100000000", "means": ""}]}"#,
                    "",
                ),
                "wider than the argument",
            ),
            (
                list(
                    r#"{"calls": ["read"], "why": "x", "when":
                        [{"arg": 0, "width": 32, "op": "eq", "value": 4, "mask": 3, "means": ""}]}"#,
                    "",
                ),
                "bits outside the mask",
            ),
            (r#"{"about": [], "allow": [], "refuse": []}"#.to_owned(), "missing field `observe`"),
            (
                r#"{"about": [], "allow": [], "refuse": [], "observe": [], "kill": []}"#.to_owned(),
                "unknown field `kill`",
            ),
        ];
        for (list, message) in table {
            assert!(error(&list).contains(message), "{}", error(&list));
        }
    }

    #[test]
    fn an_empty_list_lets_nothing_pass() {
        let list = r#"{"about": [], "allow": [], "refuse": [], "observe": []}"#;
        let compiled = compile_for(list, WatchLevel::Everything, Architecture::X86_64).unwrap();
        assert_eq!(verdict(&compiled, Architecture::X86_64, "read", &[]), Some(Verdict::Notify));
    }

    /// Prints what the start of a run pays; `--nocapture` shows it. The bound is for debug builds on a busy machine.
    #[test]
    fn compiling_is_quick() {
        let start = std::time::Instant::now();
        default_list(WatchLevel::Everything, Architecture::RUNNING);
        let taken = start.elapsed();
        println!("compiled in {taken:?}");
        assert!(taken < std::time::Duration::from_millis(250), "{taken:?}");
    }

    #[test]
    fn the_table_of_calls_is_sorted_and_each_number_has_one_name() {
        let names: Vec<_> = calls::names().collect();
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]));
        for machine in BOTH {
            let numbers: Vec<_> = names.iter().filter_map(|name| calls::number(name, machine)).collect();
            assert_eq!(numbers.iter().collect::<HashSet<_>>().len(), numbers.len());
            assert!(numbers.iter().all(|number| *number < i64::from(calls::FIRST_UNKNOWN)));
        }
    }

    macro_rules! with_names {
        ($($constant:ident),+ $(,)?) => { &[$((stringify!($constant), libc::$constant)),+] };
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    #[allow(deprecated)] // libc marks calls that Linux no longer has; their numbers stay taken.
    fn the_table_of_calls_agrees_with_libc() {
        let constants: &[(&str, libc::c_long)] = with_names![
            SYS__sysctl,
            SYS_accept,
            SYS_accept4,
            SYS_access,
            SYS_acct,
            SYS_add_key,
            SYS_adjtimex,
            SYS_afs_syscall,
            SYS_alarm,
            SYS_arch_prctl,
            SYS_bind,
            SYS_bpf,
            SYS_brk,
            SYS_capget,
            SYS_capset,
            SYS_chdir,
            SYS_chmod,
            SYS_chown,
            SYS_chroot,
            SYS_clock_adjtime,
            SYS_clock_getres,
            SYS_clock_gettime,
            SYS_clock_nanosleep,
            SYS_clock_settime,
            SYS_clone,
            SYS_clone3,
            SYS_close,
            SYS_close_range,
            SYS_connect,
            SYS_copy_file_range,
            SYS_creat,
            SYS_delete_module,
            SYS_dup,
            SYS_dup2,
            SYS_dup3,
            SYS_epoll_create,
            SYS_epoll_create1,
            SYS_epoll_ctl,
            SYS_epoll_ctl_old,
            SYS_epoll_pwait,
            SYS_epoll_pwait2,
            SYS_epoll_wait,
            SYS_epoll_wait_old,
            SYS_eventfd,
            SYS_eventfd2,
            SYS_execve,
            SYS_execveat,
            SYS_exit,
            SYS_exit_group,
            SYS_faccessat,
            SYS_faccessat2,
            SYS_fadvise64,
            SYS_fallocate,
            SYS_fanotify_init,
            SYS_fanotify_mark,
            SYS_fchdir,
            SYS_fchmod,
            SYS_fchmodat,
            SYS_fchown,
            SYS_fchownat,
            SYS_fcntl,
            SYS_fdatasync,
            SYS_fgetxattr,
            SYS_finit_module,
            SYS_flistxattr,
            SYS_flock,
            SYS_fork,
            SYS_fremovexattr,
            SYS_fsconfig,
            SYS_fsetxattr,
            SYS_fsmount,
            SYS_fsopen,
            SYS_fspick,
            SYS_fstat,
            SYS_fstatfs,
            SYS_fsync,
            SYS_ftruncate,
            SYS_futex,
            SYS_futex_waitv,
            SYS_futimesat,
            SYS_get_mempolicy,
            SYS_get_robust_list,
            SYS_get_thread_area,
            SYS_getcpu,
            SYS_getcwd,
            SYS_getdents,
            SYS_getdents64,
            SYS_getegid,
            SYS_geteuid,
            SYS_getgid,
            SYS_getgroups,
            SYS_getitimer,
            SYS_getpeername,
            SYS_getpgid,
            SYS_getpgrp,
            SYS_getpid,
            SYS_getpmsg,
            SYS_getppid,
            SYS_getpriority,
            SYS_getrandom,
            SYS_getresgid,
            SYS_getresuid,
            SYS_getrlimit,
            SYS_getrusage,
            SYS_getsid,
            SYS_getsockname,
            SYS_getsockopt,
            SYS_gettid,
            SYS_gettimeofday,
            SYS_getuid,
            SYS_getxattr,
            SYS_init_module,
            SYS_inotify_add_watch,
            SYS_inotify_init,
            SYS_inotify_init1,
            SYS_inotify_rm_watch,
            SYS_io_cancel,
            SYS_io_destroy,
            SYS_io_getevents,
            SYS_io_setup,
            SYS_io_submit,
            SYS_io_uring_enter,
            SYS_io_uring_register,
            SYS_io_uring_setup,
            SYS_ioctl,
            SYS_ioperm,
            SYS_iopl,
            SYS_ioprio_get,
            SYS_ioprio_set,
            SYS_kcmp,
            SYS_kexec_file_load,
            SYS_kexec_load,
            SYS_keyctl,
            SYS_kill,
            SYS_landlock_add_rule,
            SYS_landlock_create_ruleset,
            SYS_landlock_restrict_self,
            SYS_lchown,
            SYS_lgetxattr,
            SYS_link,
            SYS_linkat,
            SYS_listen,
            SYS_listxattr,
            SYS_llistxattr,
            SYS_lookup_dcookie,
            SYS_lremovexattr,
            SYS_lseek,
            SYS_lsetxattr,
            SYS_lstat,
            SYS_madvise,
            SYS_mbind,
            SYS_membarrier,
            SYS_memfd_create,
            SYS_migrate_pages,
            SYS_mincore,
            SYS_mkdir,
            SYS_mkdirat,
            SYS_mknod,
            SYS_mknodat,
            SYS_mlock,
            SYS_mlock2,
            SYS_mlockall,
            SYS_mmap,
            SYS_modify_ldt,
            SYS_mount,
            SYS_mount_setattr,
            SYS_move_mount,
            SYS_move_pages,
            SYS_mprotect,
            SYS_mq_getsetattr,
            SYS_mq_notify,
            SYS_mq_open,
            SYS_mq_timedreceive,
            SYS_mq_timedsend,
            SYS_mq_unlink,
            SYS_mremap,
            SYS_msgctl,
            SYS_msgget,
            SYS_msgrcv,
            SYS_msgsnd,
            SYS_msync,
            SYS_munlock,
            SYS_munlockall,
            SYS_munmap,
            SYS_name_to_handle_at,
            SYS_nanosleep,
            SYS_newfstatat,
            SYS_nfsservctl,
            SYS_open,
            SYS_open_by_handle_at,
            SYS_open_tree,
            SYS_openat,
            SYS_openat2,
            SYS_pause,
            SYS_perf_event_open,
            SYS_personality,
            SYS_pidfd_getfd,
            SYS_pidfd_open,
            SYS_pidfd_send_signal,
            SYS_pipe,
            SYS_pipe2,
            SYS_pivot_root,
            SYS_pkey_alloc,
            SYS_pkey_free,
            SYS_pkey_mprotect,
            SYS_poll,
            SYS_ppoll,
            SYS_prctl,
            SYS_pread64,
            SYS_preadv,
            SYS_preadv2,
            SYS_prlimit64,
            SYS_process_madvise,
            SYS_process_mrelease,
            SYS_process_vm_readv,
            SYS_process_vm_writev,
            SYS_pselect6,
            SYS_ptrace,
            SYS_putpmsg,
            SYS_pwrite64,
            SYS_pwritev,
            SYS_pwritev2,
            SYS_quotactl,
            SYS_quotactl_fd,
            SYS_read,
            SYS_readahead,
            SYS_readlink,
            SYS_readlinkat,
            SYS_readv,
            SYS_reboot,
            SYS_recvfrom,
            SYS_recvmmsg,
            SYS_recvmsg,
            SYS_remap_file_pages,
            SYS_removexattr,
            SYS_rename,
            SYS_renameat,
            SYS_renameat2,
            SYS_request_key,
            SYS_restart_syscall,
            SYS_rmdir,
            SYS_rseq,
            SYS_rt_sigaction,
            SYS_rt_sigpending,
            SYS_rt_sigprocmask,
            SYS_rt_sigqueueinfo,
            SYS_rt_sigreturn,
            SYS_rt_sigsuspend,
            SYS_rt_sigtimedwait,
            SYS_rt_tgsigqueueinfo,
            SYS_sched_get_priority_max,
            SYS_sched_get_priority_min,
            SYS_sched_getaffinity,
            SYS_sched_getattr,
            SYS_sched_getparam,
            SYS_sched_getscheduler,
            SYS_sched_rr_get_interval,
            SYS_sched_setaffinity,
            SYS_sched_setattr,
            SYS_sched_setparam,
            SYS_sched_setscheduler,
            SYS_sched_yield,
            SYS_seccomp,
            SYS_security,
            SYS_select,
            SYS_semctl,
            SYS_semget,
            SYS_semop,
            SYS_semtimedop,
            SYS_sendfile,
            SYS_sendmmsg,
            SYS_sendmsg,
            SYS_sendto,
            SYS_set_mempolicy,
            SYS_set_mempolicy_home_node,
            SYS_set_robust_list,
            SYS_set_thread_area,
            SYS_set_tid_address,
            SYS_setdomainname,
            SYS_setfsgid,
            SYS_setfsuid,
            SYS_setgid,
            SYS_setgroups,
            SYS_sethostname,
            SYS_setitimer,
            SYS_setns,
            SYS_setpgid,
            SYS_setpriority,
            SYS_setregid,
            SYS_setresgid,
            SYS_setresuid,
            SYS_setreuid,
            SYS_setrlimit,
            SYS_setsid,
            SYS_setsockopt,
            SYS_settimeofday,
            SYS_setuid,
            SYS_setxattr,
            SYS_shmat,
            SYS_shmctl,
            SYS_shmdt,
            SYS_shmget,
            SYS_shutdown,
            SYS_sigaltstack,
            SYS_signalfd,
            SYS_signalfd4,
            SYS_socket,
            SYS_socketpair,
            SYS_splice,
            SYS_stat,
            SYS_statfs,
            SYS_statx,
            SYS_swapoff,
            SYS_swapon,
            SYS_symlink,
            SYS_symlinkat,
            SYS_sync,
            SYS_sync_file_range,
            SYS_syncfs,
            SYS_sysfs,
            SYS_sysinfo,
            SYS_syslog,
            SYS_tee,
            SYS_tgkill,
            SYS_time,
            SYS_timer_create,
            SYS_timer_delete,
            SYS_timer_getoverrun,
            SYS_timer_gettime,
            SYS_timer_settime,
            SYS_timerfd_create,
            SYS_timerfd_gettime,
            SYS_timerfd_settime,
            SYS_times,
            SYS_tkill,
            SYS_truncate,
            SYS_tuxcall,
            SYS_umask,
            SYS_umount2,
            SYS_uname,
            SYS_unlink,
            SYS_unlinkat,
            SYS_unshare,
            SYS_uselib,
            SYS_userfaultfd,
            SYS_ustat,
            SYS_utime,
            SYS_utimensat,
            SYS_utimes,
            SYS_vfork,
            SYS_vhangup,
            SYS_vmsplice,
            SYS_vserver,
            SYS_wait4,
            SYS_waitid,
            SYS_write,
            SYS_writev,
        ];
        for (constant, number) in constants {
            let name = constant.strip_prefix("SYS_").unwrap();
            assert_eq!(syscall_number(name), Some(*number), "{name}");
            assert_eq!(syscall_name(*number), Some(name));
        }
    }
}
