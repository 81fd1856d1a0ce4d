//! A jail's network, for a run that has one: every address is the jail's own, and what is sent to it reaches two
//! sockets that the supervisor holds.
//!
//! Nothing of ours runs in the jail for it. The sockets are made here, while the namespace's owner still has its
//! capabilities, and sent away; the rules stay behind, and nobody who is left may change them (network_namespaces(7),
//! netlink(7)). The namespace has no interface but its loopback, so a fault in the rules can hide a connection from the
//! supervisor but lets nothing out.

mod netlink;
pub mod refused;
mod rules;

use super::step::{At, Failure};
use crate::{
    channel,
    protocol::{FromShim, Layer, Network, Plan, Way},
};
use netlink::{Message, Netlink, NEW};
use nix::{
    errno::Errno,
    net::if_::if_nametoindex,
    sys::socket::{
        bind, connect, listen, setsockopt, socket, sockopt, AddressFamily, Backlog, SockFlag, SockProtocol, SockType,
        SockaddrIn, SockaddrIn6, SockaddrStorage,
    },
};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// Where names are asked for: the jail's resolv.conf names it.
pub const NAMES: SocketAddrV4 = SocketAddrV4::new(crate::protocol::NAME_SERVER, 53);
/// At most so many listeners, where each port needs its own.
const MAX_PORTS: usize = 48;
/// Connections that wait to be accepted: the most that the kernel takes by default (listen(2)).
const BACKLOG: i32 = 4096;

/// What stays in the jail of its network.
pub struct Standing {
    /// How connections are taken.
    pub way: Way,
    /// Hears of datagrams that were dropped.
    pub refused: Option<OwnedFd>,
}

/// Sets the network up, if the plan has one, and sends the sockets to the supervisor.
pub fn raise(control: &OwnedFd, plan: &Plan) -> Result<Option<Standing>, Failure> {
    let Some(network) = plan.network.as_ref().filter(|_| !plan.without.contains(&Layer::Network)) else {
        return Ok(None);
    };
    let tables = if plan.without.contains(&Layer::Redirect) { Tables::Missing } else { Tables::Used };
    let Sockets { way, listeners, names, refused } = Sockets::open(network, tables)?;
    let told = refused.is_some();
    let attached: Vec<BorrowedFd> = listeners.iter().chain([&names]).map(AsFd::as_fd).collect();
    channel::send(control.as_fd(), &FromShim::Network { way, told }, &attached).at("sendmsg", "the supervisor")?;
    Ok(Some(Standing { way, refused }))
}

/// Begins a connection within the jail. Only its loopback is reached: its namespace has nothing else.
///
/// # Errors
/// The error number of what failed at once.
pub fn dial(to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, SockProtocol::Tcp)?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Whether nf_tables is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// Where the kernel has it.
    Used,
    /// As on a kernel without it, for tests.
    Missing,
}

/// What the network is made of, in the namespace that it was made in.
pub struct Sockets {
    /// How connections are taken.
    pub way: Way,
    /// Where they arrive.
    pub listeners: Vec<OwnedFd>,
    /// Where name lookups arrive.
    pub names: OwnedFd,
    /// Hears of datagrams that were dropped.
    pub refused: Option<OwnedFd>,
}

impl Sockets {
    /// Sets routes and rules up, and opens the sockets to which they lead.
    pub fn open(network: &Network, tables: Tables) -> Result<Sockets, Failure> {
        let families = every_address_is_local()?;
        let refused = refused::listen();
        let redirected = match tables {
            Tables::Used => redirect(network, families, refused.is_ok()),
            Tables::Missing => Err(io::Error::from_raw_os_error(libc::EPROTONOSUPPORT)).at("nf_tables", "left out"),
        };
        let (way, listeners, refused) = match redirected {
            Ok(listener) => (Way::Redirect, vec![listener], refused.ok()),
            Err(failure) => (Way::Ports, on_each_port(network, families, &failure)?, None),
        };
        Ok(Sockets { way, listeners, names: name_socket()?, refused })
    }
}

/// Which families there are. IPv4 always is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Families {
    /// IPv4 alone: the kernel was built or started without IPv6.
    Four,
    /// Both.
    Both,
}

/// Makes every address one of the loopback's (`ip route add local default dev lo`), with the loopback's own as the
/// sender's: a program that asks which address it has gets one that its own servers have too.
fn every_address_is_local() -> Result<Families, Failure> {
    let loopback = if_nametoindex("lo").at("if_nametoindex", "lo")?;
    let add =
        |address: IpAddr| Netlink::open(SockProtocol::NetlinkRoute)?.transact(vec![local_default(address, loopback)]);
    add(Ipv4Addr::LOCALHOST.into()).at("RTM_NEWROUTE", "local default dev lo").map_err(explain)?;
    if !has_ipv6() {
        return Ok(Families::Four);
    }
    add(Ipv6Addr::LOCALHOST.into()).at("RTM_NEWROUTE", "local default dev lo, IPv6").map_err(explain)?;
    Ok(Families::Both)
}

/// rtnetlink(7), `RTM_NEWROUTE` with a `struct rtmsg`.
fn local_default(source: IpAddr, device: u32) -> Message {
    let family = if source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (destination_length, source_length, service) = (0, 0, 0);
    let header = [
        family as u8,
        destination_length,
        source_length,
        service,
        libc::RT_TABLE_LOCAL,
        libc::RTPROT_STATIC,
        libc::RT_SCOPE_HOST,
        libc::RTN_LOCAL,
        0,
        0,
        0,
        0,
    ];
    let source = match source {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    Message::new(libc::RTM_NEWROUTE, NEW, &header)
        .with(libc::RTA_OIF, &device.to_ne_bytes())
        .with(libc::RTA_PREFSRC, &source)
}

fn has_ipv6() -> bool {
    let tried = socket(AddressFamily::Inet6, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)
        .and_then(|socket| bind(socket.as_raw_fd(), &v6(Ipv6Addr::LOCALHOST, 0)));
    tried.is_ok()
}

/// One listener, and the table that leads everything to it.
fn redirect(network: &Network, families: Families, told: bool) -> Result<OwnedFd, Failure> {
    // Below 1024, where no program of the jail can have its own server: it never takes a port that one wants.
    let mut free = (1..1024).filter(|port| !network.host_ports.contains(port));
    let (Some(port), Some(nobody)) = (free.next(), free.next()) else {
        return Err(Errno::EADDRINUSE).at("bind", "a port below 1024 that is not granted");
    };
    let listener = listener(port, families)?;
    let told = told.then_some(refused::GROUP);
    rules::install(&rules::Rules { listener: port, nobody, host_ports: &network.host_ports, told })
        .at("nf_tables", "table inet tollgate")?;
    Ok(listener)
}

/// Without nf_tables: a listener on each port that the policy names. As every address is local, it hears connections to
/// all of them.
fn on_each_port(network: &Network, families: Families, missing: &Failure) -> Result<Vec<OwnedFd>, Failure> {
    let mut ports: Vec<u16> = network.ports.iter().chain(&network.host_ports).copied().collect();
    ports.sort_unstable();
    ports.dedup();
    if ports.is_empty() || ports.len() > MAX_PORTS {
        return Err(Errno::E2BIG).at("listen", format_args!("{} ports", ports.len())).map_err(|failure: Failure| {
            failure.remedy(format!(
                "connections cannot be redirected here ({}), and without that a run can have from 1 to {MAX_PORTS} \
                 named ports; name fewer in the policy, or use a kernel with CONFIG_NF_TABLES, CONFIG_NF_TABLES_INET, \
                 CONFIG_NFT_NAT and CONFIG_NFT_REDIR",
                missing.summary()
            ))
        });
    }
    ports.into_iter().map(|port| listener(port, families)).collect()
}

/// A socket that accepts connections to this port of every address.
fn listener(port: u16, families: Families) -> Result<OwnedFd, Failure> {
    let family = if families == Families::Both { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let made = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).at("socket", "TCP")?;
    match families {
        Families::Both => {
            setsockopt(&made, sockopt::Ipv6V6Only, &false).at("setsockopt", "IPV6_V6ONLY")?;
            bind(made.as_raw_fd(), &v6(Ipv6Addr::UNSPECIFIED, port))
        }
        Families::Four => bind(made.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))),
    }
    .at("bind", format_args!("port {port}"))?;
    let backlog = Backlog::new(BACKLOG).unwrap_or(Backlog::MAXCONN);
    listen(&made, backlog).at("listen", format_args!("port {port}"))?;
    Ok(made)
}

fn name_socket() -> Result<OwnedFd, Failure> {
    let made = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None).at("socket", "UDP")?;
    bind(made.as_raw_fd(), &SockaddrIn::from(NAMES)).at("bind", NAMES)?;
    Ok(made)
}

fn v6(address: Ipv6Addr, port: u16) -> SockaddrIn6 {
    SockaddrIn6::from(SocketAddrV6::new(address, port, 0, 0))
}

fn explain(failure: Failure) -> Failure {
    failure.remedy(
        "the kernel refuses to make every address local to the jail's loopback, without which no connection can be \
         taken; run without a network (no rule for `http/request` or `net/connect`), or use another kernel",
    )
}
