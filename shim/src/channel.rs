//! The control socket: one JSON message a packet, descriptors attached.

use crate::protocol::MAX_MESSAGE;
use nix::sys::socket::{recv, recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags};
use serde::{de::DeserializeOwned, Serialize};
use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
};

/// At most this many descriptors travel with one message.
const MAX_DESCRIPTORS: usize = 64;

/// Sends one message with these descriptors.
///
/// # Errors
/// `EPIPE` or `ECONNRESET` when the other side is gone, `EMSGSIZE` when the message is too long.
pub fn send(socket: BorrowedFd, message: &impl Serialize, attached: &[BorrowedFd]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_MESSAGE {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    let raw: Vec<RawFd> = attached.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], rights, MsgFlags::MSG_NOSIGNAL, None) {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Receives one message and its descriptors; none when the other side has closed.
///
/// # Errors
/// `EAGAIN` on a non-blocking socket without a message; `InvalidData` for what is not a message.
pub fn receive<T: DeserializeOwned>(socket: BorrowedFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // Waited for first, so that whoever waits long holds no memory for it.
    let mut buffer = vec![0_u8; next_length(socket)?.clamp(1, MAX_MESSAGE)];
    let mut space = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let (length, truncated, attached) = {
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let packet = loop {
            match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
                Err(nix::errno::Errno::EINTR) => continue,
                other => break other,
            }
        };
        let packet = match packet {
            Err(nix::errno::Errno::ECONNRESET) => return Ok(None),
            other => other?,
        };
        let mut attached = Vec::new();
        for control in packet.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = control {
                attached.extend(raw.into_iter().map(adopt));
            }
        }
        (packet.bytes, packet.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC), attached)
    };
    if length == 0 {
        return Ok(None);
    }
    if truncated {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message of the control socket was cut"));
    }
    Ok(Some((serde_json::from_slice(&buffer[..length])?, attached)))
}

/// Waits for the next message, and gives its length: 0 when the other side has closed.
fn next_length(socket: BorrowedFd) -> io::Result<usize> {
    loop {
        match recv(socket.as_raw_fd(), &mut [], MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC) {
            Err(nix::errno::Errno::EINTR) => continue,
            Err(nix::errno::Errno::ECONNRESET) => return Ok(0),
            Err(errno) => return Err(errno.into()),
            Ok(length) => return Ok(length),
        }
    }
}

#[allow(unsafe_code)]
fn adopt(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us out of an SCM_RIGHTS message; nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{socketpair, AddressFamily, SockFlag, SockType};
    use std::os::fd::AsFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap()
    }

    #[test]
    fn a_message_arrives_with_its_descriptors() {
        let (left, right) = pair();
        send(left.as_fd(), &crate::protocol::ToShim::Begin, &[left.as_fd(), right.as_fd()]).unwrap();
        let (message, attached) = receive::<crate::protocol::ToShim>(right.as_fd()).unwrap().unwrap();
        assert_eq!(message, crate::protocol::ToShim::Begin);
        assert_eq!(attached.len(), 2);
    }

    #[test]
    fn a_closed_end_is_the_end() {
        let (left, right) = pair();
        drop(left);
        assert!(receive::<crate::protocol::ToShim>(right.as_fd()).unwrap().is_none());
    }

    #[test]
    fn what_is_not_a_message_is_an_error() {
        let (left, right) = pair();
        nix::unistd::write(&left, b"{{{").unwrap();
        assert!(receive::<crate::protocol::ToShim>(right.as_fd()).is_err());
    }
}
