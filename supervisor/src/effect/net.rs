//! Connections and names outside the jail, by the network door.
//!
//! What the jail's own layers refused of connections keeps the kind `net/connect` with a request of
//! [`super::jail`], and what waits at the program's door one of [`super::program`].

use super::{Class, Declaration, Door, FaultKind, FaultShape, Idempotency, Kind, Resource, Size, StandIn};
use serde::{Deserialize, Serialize};
use std::{fmt, net::Ipv6Addr};

const CONNECT_FAULTS: &[FaultShape] = &[
    FaultShape {
        kind: FaultKind::Error,
        doors: &[Door::Program, Door::Network],
        arrives: &["ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETUNREACH", "ETIMEDOUT"],
    },
    FaultShape { kind: FaultKind::Timeout, doors: &[Door::Program, Door::Network], arrives: &["ETIMEDOUT"] },
    FaultShape { kind: FaultKind::Cut, doors: &[Door::Network], arrives: &["a stream of bytes that breaks off"] },
];

/// The connection stands before it is decided, so a refusal of any kind is seen as a reset.
const ACCEPT_FAULTS: &[FaultShape] =
    &[FaultShape { kind: FaultKind::Error, doors: &[Door::Network], arrives: &["ECONNRESET"] }];

/// The door answers a question about a name itself, so what can go wrong is what a resolver says of itself: SERVFAIL,
/// which programs see as EAI_AGAIN, and silence.
const RESOLVE_FAULTS: &[FaultShape] = &[
    FaultShape { kind: FaultKind::Error, doors: &[Door::Network], arrives: &["EAGAIN"] },
    FaultShape { kind: FaultKind::Timeout, doors: &[Door::Network], arrives: &["ETIMEDOUT"] },
];

/// A connection to something outside the jail.
pub const CONNECT: Declaration = Declaration {
    kind: Kind::NetConnect,
    name: "net/connect",
    classes: &[Class::Network, Class::Egress],
    idempotency: Idempotency::Once,
    resource: "a host and port, or a socket's path",
    summary: "Connect to something outside the jail.",
    at_api_door: false,
    stand_in: StandIn::Nothing,
    size: Size::Nothing,
    faults: CONNECT_FAULTS,
};

/// A question about a name. It is answered inside the run, so that no name leaves the machine before a connection to it
/// is admitted.
pub const RESOLVE: Declaration = Declaration {
    kind: Kind::NetResolve,
    name: "net/resolve",
    classes: &[Class::Network],
    idempotency: Idempotency::Idempotent,
    resource: "a name",
    summary: "Ask for the addresses of a name; the answer is made within the run.",
    at_api_door: false,
    stand_in: StandIn::World,
    size: Size::Nothing,
    faults: RESOLVE_FAULTS,
};

/// A connection from the host to a port that the run publishes. What the program answers leaves the jail with it.
pub const ACCEPT: Declaration = Declaration {
    kind: Kind::NetAccept,
    name: "net/accept",
    classes: &[Class::Network, Class::Egress],
    idempotency: Idempotency::Once,
    resource: "an address and port of the host",
    summary: "Take a connection from the host on a port that the run publishes.",
    at_api_door: false,
    stand_in: StandIn::Nothing,
    size: Size::Nothing,
    faults: ACCEPT_FAULTS,
};

/// What carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// A stream.
    Tcp,
    /// Datagrams.
    Udp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
        })
    }
}

/// The arguments of an effect on the network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verb")]
pub enum Request {
    /// `net/connect`.
    Connect {
        /// The name, or the address where the program gave one: lower case, no dot at the end, IPv6 without brackets.
        host: String,
        /// The port.
        port: u16,
        /// What carries it.
        transport: Transport,
    },
    /// `net/accept`.
    Accept {
        /// The address of the host at which the port is published.
        host: String,
        /// The port there.
        port: u16,
        /// The port in the jail that it leads to.
        inside: u16,
        /// The address that the connection comes from.
        from: String,
    },
    /// `net/resolve`.
    Resolve {
        /// The name: lower case, no dot at the end.
        name: String,
        /// The type of record that was asked for: `A`, `AAAA`, `TXT`.
        record: String,
    },
}

impl Request {
    /// The resource of an effect with this request.
    pub fn resource(&self) -> Resource {
        let to = match self {
            Request::Connect { host, port, .. } | Request::Accept { host, port, .. } => {
                format!("{}:{port}", bracketed(host))
            }
            Request::Resolve { name, .. } => name.clone(),
        };
        Resource::Address { to }
    }
}

/// A host as URLs and addresses have it: an IPv6 literal in brackets.
pub fn bracketed(host: &str) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(_) => format!("[{host}]"),
        Err(_not_ipv6) => host.to_owned(),
    }
}
