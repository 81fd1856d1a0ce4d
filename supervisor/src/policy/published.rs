//! Ports of a jail that the host may connect to. No policy file opens one: they are asked for run by run.

use std::{
    net::{Ipv4Addr, SocketAddr},
    str::FromStr,
};

/// A port of the jail, and where on the host it is to be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The address on the host.
    pub at: SocketAddr,
    /// The port in the jail.
    pub inside: u16,
}

/// Why a text names no port to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write PORT, PORT:PORT or ADDRESS:PORT:PORT: where on the host (127.0.0.1 unless named), then which port of the jail")]
pub struct NotPublished;

impl FromStr for Published {
    type Err = NotPublished;

    /// Reads `[[ADDRESS:]PORT:]PORT`, an IPv6 address in brackets.
    fn from_str(text: &str) -> Result<Published, NotPublished> {
        let port = |text: &str| text.parse().ok().filter(|port: &u16| *port > 0).ok_or(NotPublished);
        let (rest, inside) = match text.rsplit_once(':') {
            Some((rest, inside)) => (Some(rest), port(inside)?),
            None => (None, port(text)?),
        };
        let at = match rest {
            None => SocketAddr::from((Ipv4Addr::LOCALHOST, inside)),
            Some(rest) => match rest.rsplit_once(':') {
                Some((address, at)) => {
                    let bare = address.strip_prefix('[').and_then(|bare| bare.strip_suffix(']')).unwrap_or(address);
                    SocketAddr::new(bare.parse().map_err(|_no_address| NotPublished)?, port(at)?)
                }
                None => SocketAddr::from((Ipv4Addr::LOCALHOST, port(rest)?)),
            },
        };
        Ok(Published { at, inside })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_published_at_the_loopback_unless_an_address_is_named() {
        let at = |text: &str| text.parse::<Published>().map(|port| (port.at.to_string(), port.inside));
        assert_eq!(at("8123"), Ok(("127.0.0.1:8123".to_owned(), 8123)));
        assert_eq!(at("80:8123"), Ok(("127.0.0.1:80".to_owned(), 8123)));
        assert_eq!(at("0.0.0.0:80:8123"), Ok(("0.0.0.0:80".to_owned(), 8123)));
        assert_eq!(at("[::1]:80:8123"), Ok(("[::1]:80".to_owned(), 8123)));
        for wrong in ["", "x", "0", "70000", "80:", ":80", "1:2:3", "a.test:80:80", "80:81:82:83"] {
            assert_eq!(at(wrong), Err(NotPublished), "{wrong}");
        }
    }
}
