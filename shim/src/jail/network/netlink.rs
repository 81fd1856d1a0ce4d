//! Messages to the kernel's network configuration (netlink(7)): how they are laid out, sent and acknowledged.
//!
//! Written here and not taken from a crate: what a jail needs is a handful of messages, and the crates that speak
//! nf_tables need the C library's or a runtime of their own.

use nix::{
    errno::Errno,
    sys::socket::{recv, send, socket, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType},
};
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

// linux/netlink.h.
pub const NLM_F_REQUEST: u16 = 0x1;
pub const NLM_F_ACK: u16 = 0x4;
pub const NLM_F_CREATE: u16 = 0x400;
pub const NLM_F_APPEND: u16 = 0x800;
const NLM_F_EXCL: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;
/// The length of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Everything begins at a multiple of this.
const ALIGNMENT: usize = 4;

/// Makes something new, and says whether it took.
pub const NEW: u16 = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
/// Asks for something, and wants to know whether it took.
pub const ACKNOWLEDGED: u16 = NLM_F_REQUEST | NLM_F_ACK;

/// One message, as it grows.
pub struct Message(Vec<u8>);

impl Message {
    /// A message of this type with these flags, and its family's own header.
    pub fn new(kind: u16, flags: u16, header: &[u8]) -> Message {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        let mut message = Message(bytes);
        message.0.extend(header);
        message.align();
        message
    }

    /// Adds an attribute.
    pub fn with(mut self, kind: u16, value: &[u8]) -> Message {
        self.put(kind, |bytes| bytes.extend(value));
        self
    }

    /// Adds an attribute that holds others.
    pub fn with_nested(mut self, kind: u16, inner: &Attributes) -> Message {
        self.put(kind | NLA_F_NESTED, |bytes| bytes.extend(&inner.0));
        self
    }

    fn put(&mut self, kind: u16, value: impl FnOnce(&mut Vec<u8>)) {
        put(&mut self.0, kind, value);
    }

    fn align(&mut self) {
        align(&mut self.0);
    }

    /// The message with its length and number in place.
    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.0.len() as u32;
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.0
    }

    fn wants_answer(&self) -> bool {
        u16::from_ne_bytes([self.0[6], self.0[7]]) & NLM_F_ACK != 0
    }
}

/// What a nesting attribute holds.
#[derive(Default)]
pub struct Attributes(Vec<u8>);

impl Attributes {
    /// None.
    pub fn new() -> Attributes {
        Attributes::default()
    }

    /// Adds one.
    pub fn with(mut self, kind: u16, value: &[u8]) -> Attributes {
        put(&mut self.0, kind, |bytes| bytes.extend(value));
        self
    }

    /// Adds one that holds others.
    pub fn with_nested(mut self, kind: u16, inner: &Attributes) -> Attributes {
        put(&mut self.0, kind | NLA_F_NESTED, |bytes| bytes.extend(&inner.0));
        self
    }
}

/// A `struct nlattr` and its value, padded.
fn put(bytes: &mut Vec<u8>, kind: u16, value: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.extend([0; 4]);
    value(bytes);
    // Our own values are names, numbers and rules: far below the 64 KiB that the field can say.
    let length = (bytes.len() - start) as u16;
    bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    bytes[start + 2..start + 4].copy_from_slice(&kind.to_ne_bytes());
    align(bytes);
}

fn align(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
}

/// A netlink socket of one protocol.
pub struct Netlink(OwnedFd);

impl Netlink {
    /// Opens one.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` where the kernel lacks the protocol.
    pub fn open(protocol: SockProtocol) -> io::Result<Netlink> {
        Ok(Netlink(socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol)?))
    }

    /// Sends these messages in one go and reads every acknowledgement that they ask for.
    ///
    /// # Errors
    /// The first that the kernel answers with.
    pub fn transact(&self, messages: Vec<Message>) -> io::Result<()> {
        let mut awaited = messages.iter().filter(|message| message.wants_answer()).count();
        let numbered = messages.into_iter().zip(1_u32..);
        let all: Vec<u8> = numbered.flat_map(|(message, sequence)| message.finish(sequence)).collect();
        send(self.0.as_raw_fd(), &all, MsgFlags::empty())?;
        let mut buffer = vec![0; 32 * 1024];
        while awaited > 0 {
            // The kernel has dealt with it all by the time the send is over: what is not there will not come.
            let length = match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Err(io::Error::from_raw_os_error(libc::EPROTO)),
                other => other?,
            };
            for (kind, content) in Received::new(&buffer[..length]) {
                if kind != NLMSG_ERROR {
                    continue;
                }
                // `struct nlmsgerr` begins with the error number, negative, or 0.
                match content.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)) {
                    Some(0) => awaited = awaited.saturating_sub(1),
                    Some(error) => return Err(io::Error::from_raw_os_error(error.saturating_neg())),
                    None => return Err(io::Error::from_raw_os_error(libc::EPROTO)),
                }
            }
        }
        Ok(())
    }

    /// The socket itself.
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

/// The messages of one packet from the kernel: type and what follows the header.
pub struct Received<'a>(&'a [u8]);

impl<'a> Received<'a> {
    /// Those in these bytes. Ends at the first that is cut.
    pub fn new(bytes: &'a [u8]) -> Received<'a> {
        Received(bytes)
    }
}

impl<'a> Iterator for Received<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let length = u32::from_ne_bytes(*self.0.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(self.0.get(4..6)?.try_into().ok()?);
        let content = self.0.get(HEADER..length)?;
        self.0 = self.0.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some((kind, content))
    }
}

/// The attributes in these bytes: type and value. Ends at the first that is cut.
pub struct Held<'a>(pub &'a [u8]);

impl<'a> Iterator for Held<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let length = usize::from(u16::from_ne_bytes(*self.0.first_chunk()?));
        let kind = u16::from_ne_bytes(self.0.get(2..4)?.try_into().ok()?) & !NLA_F_NESTED;
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
        Some((kind, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_its_length_and_its_attributes_begin_at_multiples_of_four() {
        let inner = Attributes::new().with(1, b"abc");
        let bytes = Message::new(0x10, NLM_F_REQUEST, &[9, 0, 0, 10]).with(7, b"xy").with_nested(3, &inner).finish(5);
        let expected: Vec<u8> = [
            &40_u32.to_ne_bytes()[..],
            &0x10_u16.to_ne_bytes(),
            &NLM_F_REQUEST.to_ne_bytes(),
            &5_u32.to_ne_bytes(),
            &[0; 4],
            &[9, 0, 0, 10],
            &6_u16.to_ne_bytes(),
            &7_u16.to_ne_bytes(),
            b"xy\0\0",
            &12_u16.to_ne_bytes(),
            &0x8003_u16.to_ne_bytes(),
            &7_u16.to_ne_bytes(),
            &1_u16.to_ne_bytes(),
            b"abc\0",
        ]
        .concat();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn what_was_written_is_read_back() {
        let message = Message::new(0x400, 0, &[1, 2, 3, 4]).with(10, b"payload").with(2, &[]).finish(1);
        let (kind, content) = Received::new(&message).next().unwrap();
        assert_eq!(kind, 0x400);
        assert_eq!(Held(&content[4..]).collect::<Vec<_>>(), [(10, &b"payload"[..]), (2, &b""[..])]);
    }

    #[test]
    fn lengths_that_lie_end_the_reading() {
        for bytes in [&[][..], &[1], &[0; 16], &[255; 16], &[3, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(Received::new(bytes).count(), 0, "{bytes:?}");
            assert_eq!(Held(bytes).take(10).filter(|(_, value)| !value.is_empty()).count(), 0, "{bytes:?}");
        }
    }

    #[test]
    fn the_kernels_refusal_comes_back_as_its_error_number() {
        let netlink = Netlink::open(SockProtocol::NetlinkRoute).unwrap();
        // A link of a family that nobody knows, at a number that nobody has (rtnetlink(7)).
        let message =
            Message::new(libc::RTM_NEWLINK, ACKNOWLEDGED, &[0, 0, 0, 0, 255, 255, 255, 127, 0, 0, 0, 0, 0, 0, 0, 0]);
        let error = netlink.transact(vec![message]).unwrap_err().raw_os_error();
        assert!(matches!(error, Some(libc::ENODEV | libc::EPERM)), "{error:?}");
    }
}
