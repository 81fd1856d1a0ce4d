//! Datagrams that the table dropped, as the kernel tells them: so that a refusal has a receipt however it was sent.
//!
//! A look at the calls would not do: `sendmsg` keeps its address in memory, where a filter cannot see whether there is
//! one, and looking at every send of every program costs too much.

use super::netlink::{Held, Message, Netlink, Received, ACKNOWLEDGED};
use nix::{
    errno::Errno,
    sys::socket::{recv, setsockopt, sockopt, MsgFlags, SockProtocol},
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
};

// linux/netfilter/nfnetlink.h and nfnetlink_log.h.
const NFNL_SUBSYS_ULOG: u16 = 4;
const NFULNL_MSG_PACKET: u16 = 0;
const NFULNL_MSG_CONFIG: u16 = 1;
const NFULA_CFG_CMD: u16 = 1;
const NFULA_CFG_MODE: u16 = 2;
const NFULA_CFG_NLBUFSIZ: u16 = 3;
const NFULA_CFG_QTHRESH: u16 = 5;
const NFULNL_CFG_CMD_BIND: u8 = 1;
const NFULNL_COPY_PACKET: u8 = 2;
const NFULA_PAYLOAD: u16 = 9;
/// The length of `struct nfgenmsg`.
const FAMILY_HEADER: usize = 4;
// RFC 791 3.1, RFC 8200 3.
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// The group: the namespace is the jail's own, so that any number is free.
pub const GROUP: u16 = 1;
/// So much of each packet is told: the longest IPv4 header, or an IPv6 header, and the ports.
pub const HEADERS: u32 = 64;
/// The kernel sets this much aside for each message, and a page by default: a small one lets more of them wait.
const MESSAGE: u32 = 512;
/// What may wait to be read, as far as the host lets anybody have (socket(7), `rmem_max`).
const WAITING: usize = 4 << 20;

/// What was heard at a time.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Where dropped datagrams were to go.
    pub to: Vec<SocketAddr>,
    /// Whether others were dropped for which there was no more room.
    pub lost: bool,
}

/// A socket that hears of what is logged to [`GROUP`] in this network namespace.
///
/// # Errors
/// Where the kernel has no nfnetlink_log.
pub fn listen() -> io::Result<OwnedFd> {
    let [high, low] = GROUP.to_be_bytes();
    let config = || Message::new(NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_CONFIG, ACKNOWLEDGED, &[0, 0, high, low]);
    let [a, b, c, d] = HEADERS.to_be_bytes();
    let netlink = Netlink::open(SockProtocol::NetlinkNetFilter)?;
    netlink.transact(vec![
        config().with(NFULA_CFG_CMD, &[NFULNL_CFG_CMD_BIND]),
        config().with(NFULA_CFG_MODE, &[a, b, c, d, NFULNL_COPY_PACKET, 0]),
        config().with(NFULA_CFG_NLBUFSIZ, &MESSAGE.to_be_bytes()),
        // Each packet at once: what the kernel still gathers when the program ends goes with the jail, untold.
        config().with(NFULA_CFG_QTHRESH, &1_u32.to_be_bytes()),
    ])?;
    let socket = netlink.into_descriptor();
    setsockopt(&socket, sockopt::RcvBuf, &WAITING)?;
    Ok(socket)
}

/// What has been dropped since, a packet's worth; none when there is nothing to read.
///
/// # Errors
/// When the socket is of no more use.
pub fn read(socket: &OwnedFd) -> io::Result<Option<Heard>> {
    let mut buffer = [0; 8192];
    let length = match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN) => return Ok(None),
        Err(Errno::EINTR) => return Ok(Some(Heard::default())),
        // netlink(7): the kernel had more to say than fits.
        Err(Errno::ENOBUFS) => return Ok(Some(Heard { lost: true, ..Heard::default() })),
        other => other?,
    };
    let wanted = NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET;
    let packets = Received::new(&buffer[..length]).filter(|(kind, _)| *kind == wanted);
    let payloads = packets.filter_map(|(_, content)| {
        Held(content.get(FAMILY_HEADER..)?).find(|(kind, _)| *kind == NFULA_PAYLOAD).map(|(_, value)| value)
    });
    Ok(Some(Heard { to: payloads.filter_map(destination).collect(), lost: false }))
}

/// Where a datagram goes. The headers are the kernel's own; what cannot be read is not told.
fn destination(packet: &[u8]) -> Option<SocketAddr> {
    let (address, ports) = match packet.first()? >> 4 {
        4 => {
            let length = usize::from(packet.first()? & 0xf) * 4;
            let address: [u8; 4] = packet.get(16..IPV4_HEADER)?.try_into().ok()?;
            (IpAddr::from(Ipv4Addr::from(address)), packet.get(length.max(IPV4_HEADER)..)?)
        }
        6 => {
            let address: [u8; 16] = packet.get(24..IPV6_HEADER)?.try_into().ok()?;
            // With an extension header in between (RFC 8200 4) the port is somewhere else.
            let plain = *packet.get(6)? == libc::IPPROTO_UDP as u8;
            (IpAddr::from(Ipv6Addr::from(address)), if plain { packet.get(IPV6_HEADER..)? } else { &[0; 4] })
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, u16::from_be_bytes(ports.get(2..4)?.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_read_past_the_options_of_either_family() {
        let mut four = vec![0x46; 24];
        four[16..20].copy_from_slice(&[192, 0, 2, 9]);
        four.extend([1, 2, 0x01, 0xbb]);
        assert_eq!(destination(&four), Some("192.0.2.9:443".parse().unwrap()));
        let mut six = vec![0x60; 40];
        six[6] = 17;
        six[24..40].copy_from_slice(&"2001:db8::9".parse::<Ipv6Addr>().unwrap().octets());
        six.extend([1, 2, 0x01, 0xbb]);
        assert_eq!(destination(&six), Some("[2001:db8::9]:443".parse().unwrap()));
        six[6] = 0;
        assert_eq!(destination(&six), Some("[2001:db8::9]:0".parse().unwrap()));
    }

    #[test]
    fn a_packet_that_is_cut_says_nothing() {
        for length in 0..22 {
            assert_eq!(destination(&vec![0x45; length]), None);
            assert_eq!(destination(&vec![0x60; length]), None);
        }
        assert_eq!(destination(&[0x90; 60]), None);
    }
}
