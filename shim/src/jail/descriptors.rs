//! Descriptors: what came with the plan, and nothing else.

use super::{
    first_word, network,
    sources::Holder,
    step::{step, At, Failure},
    Standard,
};
use crate::{
    protocol::{Plan, StepFailed, Way},
    sys,
};
use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Seek},
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

/// Where bubblewrap is told to leave the plan's file, and the standard streams that go on into the jail.
const PLAN_FD: RawFd = 4;
/// See [`PLAN_FD`]: three of them, from this number on.
const STREAMS_FD: RawFd = 5;
/// See [`PLAN_FD`]: what hears of datagrams that were dropped.
const REFUSED_FD: RawFd = 8;

/// The plan, its file (which bubblewrap's side reads once more), and the program's standard streams.
pub fn receive_plan(control: &OwnedFd) -> Result<(Plan, File, Standard), Failure> {
    let attached = first_word(control).at("recvmsg", "the supervisor's first message")?;
    let mut attached = attached.into_iter();
    let (Some(file), Some(input), Some(output), Some(error)) =
        (attached.next(), attached.next(), attached.next(), attached.next())
    else {
        let missing = io::Error::from_raw_os_error(libc::EBADMSG);
        return Err(missing).at("recvmsg", "the plan and three standard streams");
    };
    let mut file = File::from(file);
    let plan = read_plan(&mut file)?;
    Ok((plan, file, Standard { streams: [input, output, error] }))
}

/// The same again on bubblewrap's far side, from the documented descriptors.
pub fn receive_plan_again(
    control: &OwnedFd,
    words: &[OsString],
) -> Result<(Plan, Standard, Option<network::Standing>), StepFailed> {
    step("plan", || {
        let mut file = File::from(sys::adopt(PLAN_FD));
        let plan = read_plan(&mut file)?;
        let streams = [0, 1, 2].map(|index| sys::adopt(STREAMS_FD + index));
        // It survived bubblewrap's execution and must not survive the program's: whoever holds it speaks as the shim.
        close_on_exec(control.as_fd())?;
        // The program inherits 0 to 2 only, which are made from these later.
        for stream in &streams {
            close_on_exec(stream.as_fd())?;
        }
        let network = match words.first().and_then(|word| word.to_str()) {
            Some(TOLD) => {
                let refused = sys::adopt(REFUSED_FD);
                close_on_exec(refused.as_fd())?;
                Some(network::Standing { way: Way::Redirect, refused: Some(refused) })
            }
            Some(REDIRECT) => Some(network::Standing { way: Way::Redirect, refused: None }),
            Some(PORTS) => Some(network::Standing { way: Way::Ports, refused: None }),
            Some(_) | None => None,
        };
        Ok((plan, Standard { streams }, network))
    })
}

/// What bubblewrap's far side is told of the network that stands already.
const TOLD: &str = "redirect-told";
/// See [`TOLD`].
const REDIRECT: &str = "redirect";
/// See [`TOLD`].
const PORTS: &str = "ports";

/// The word for this network, for [`receive_plan_again`].
pub fn word_for(network: &network::Standing) -> &'static str {
    match network {
        network::Standing { way: Way::Redirect, refused: Some(_) } => TOLD,
        network::Standing { way: Way::Redirect, refused: None } => REDIRECT,
        network::Standing { way: Way::Ports, .. } => PORTS,
    }
}

/// Puts the plan, the streams and what is left of the network where [`receive_plan_again`] looks, to survive
/// bubblewrap's execution.
pub fn leave_for_inside(
    control: &OwnedFd,
    plan: &File,
    standard: &Standard,
    network: Option<&network::Standing>,
) -> Result<(), Failure> {
    // First away from the numbers that are about to be used, then into place.
    let high = |fd: RawFd| {
        nix::fcntl::fcntl(borrow(fd), nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(64)).at("fcntl", "a standard stream")
    };
    let mut moved = vec![
        (high(control.as_raw_fd())?, crate::protocol::CONTROL_FD),
        (high(plan.as_raw_fd())?, PLAN_FD),
        (high(standard.streams[0].as_raw_fd())?, STREAMS_FD),
        (high(standard.streams[1].as_raw_fd())?, STREAMS_FD + 1),
        (high(standard.streams[2].as_raw_fd())?, STREAMS_FD + 2),
    ];
    if let Some(refused) = network.and_then(|network| network.refused.as_ref()) {
        moved.push((high(refused.as_raw_fd())?, REFUSED_FD));
    }
    for (from, to) in moved {
        duplicate_onto(from, to)?;
    }
    Ok(())
}

/// dup2(2): makes the number `to` mean what `from` means, across execution.
pub fn duplicate_onto(from: RawFd, to: RawFd) -> Result<(), Failure> {
    #[allow(unsafe_code)]
    // SAFETY: `to` is a documented number that no owner in this process holds at this point.
    let result = unsafe { libc::dup2(from, to) };
    nix::errno::Errno::result(result).map(drop).at("dup2", format_args!("descriptor {to}"))
}

/// Marks every descriptor but the given ones to be closed, by closing it now.
pub fn close_all_but(
    control: &OwnedFd,
    standard: &Standard,
    plan: &File,
    holder: &Option<Holder>,
) -> Result<(), Failure> {
    let mut kept: Vec<u32> = standard.streams.iter().map(|fd| fd.as_raw_fd() as u32).collect();
    kept.extend(holder.iter().flat_map(Holder::descriptors).map(|fd| fd.as_raw_fd() as u32));
    kept.extend([control.as_raw_fd() as u32, plan.as_raw_fd() as u32]);
    kept.extend([0, 1, 2]);
    kept.sort_unstable();
    let mut first = 0;
    for keep in kept {
        if keep > first {
            sys::close_range(first, keep - 1).at("close_range", format_args!("descriptors {first} to {}", keep - 1))?;
        }
        first = first.max(keep + 1);
    }
    sys::close_range(first, u32::MAX).at("close_range", format_args!("descriptors from {first}"))
}

fn read_plan(file: &mut File) -> Result<Plan, Failure> {
    let mut bytes = Vec::new();
    file.rewind().at("lseek", "the plan")?;
    file.read_to_end(&mut bytes).at("read", "the plan")?;
    serde_json::from_slice(&bytes).map_err(io::Error::from).at("read", "the plan")
}

fn close_on_exec(fd: std::os::fd::BorrowedFd) -> Result<(), Failure> {
    nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))
        .map(drop)
        .at("fcntl", "a standard stream")
}

#[allow(unsafe_code)]
fn borrow(fd: RawFd) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: the callers pass descriptors that outlive the call this is used for.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}
