//! What a policy says about the network beside its rules.

use super::{secret::Secret, Policy};
use crate::{
    chain::admission::{is_network, Host, HostPattern, Kinds, Listed, Origin, Paths, Rule, Target, Verdict},
    effect::Kind,
};
use ipnet::IpNet;
use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

/// A network of addresses by its prefix.
pub type Cidr = IpNet;

/// What a policy says about the network beside its rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Where admitted names are looked up; the host's own resolvers if none is named.
    pub resolver: Option<SocketAddr>,
    /// Ports of the host's loopback that the jail's own loopback leads to. Sorted, each once.
    pub host_ports: Vec<u16>,
    /// The private addresses that a name may have, or that may be connected to: by host in its one form.
    pub private: BTreeMap<String, Vec<Cidr>>,
    /// What its requests may carry without the program's knowing it.
    pub secrets: Vec<Secret>,
}

impl Network {
    /// Adds what another says: its resolver wins, and the rest adds up.
    pub(super) fn join(&mut self, other: Network) {
        self.resolver = other.resolver.or(self.resolver);
        self.host_ports.extend(other.host_ports);
        self.host_ports.sort_unstable();
        self.host_ports.dedup();
        for secret in other.secrets {
            self.secrets.retain(|known| known.name != secret.name);
            self.secrets.push(secret);
        }
        for (host, networks) in other.private {
            let known = self.private.entry(host).or_default();
            known.extend(networks);
            known.sort();
            known.dedup();
        }
    }
}

/// What the program calls the host's own loopback, where a port of it is granted.
const LOOPBACK: [&str; 3] = ["127.0.0.1", "::1", "localhost"];

impl Network {
    /// The rule that the granted ports of the host are.
    pub(super) fn rule_of_host_ports(&self) -> Option<Rule> {
        let hosts: Vec<HostPattern> = LOOPBACK.iter().filter_map(|host| HostPattern::parse(host).ok()).collect();
        (!self.host_ports.is_empty()).then(|| Rule {
            verdict: Verdict::Allow,
            kinds: Kinds::Only(vec![Kind::NetConnect, Kind::HttpRequest]),
            paths: Paths::Any,
            target: Target {
                hosts: Some(Listed::new(hosts)),
                ports: Some(self.host_ports.clone()),
                ..Target::default()
            },
            origin: Origin {
                file: "[network] or the command line".to_owned(),
                line: 0,
                text: "allow the granted ports of the host".to_owned(),
            },
        })
    }
}

impl Policy {
    /// Whether a run under this policy has a way to the network: a rule that names `net/connect` or `http/request` and
    /// does not deny, or a port of the host. Rules of `any` kind do not count.
    pub fn uses_network(&self) -> bool {
        let opens = |kinds: &Kinds| match kinds {
            Kinds::Any | Kinds::All => false,
            Kinds::Only(kinds) => {
                kinds.iter().any(|kind| is_network(*kind) && !matches!(kind, Kind::NetResolve | Kind::NetAccept))
            }
        };
        let rules = || self.admission.layers().iter().flat_map(|layer| layer.rules());
        !self.network.host_ports.is_empty() || rules().any(|rule| rule.verdict != Verdict::Deny && opens(&rule.kinds))
    }

    /// The names and patterns of hosts that the rules allow or ask about, as they would be written: for people.
    pub fn allowed_hosts(&self) -> Vec<String> {
        let rules = self.admission.layers().iter().flat_map(|layer| layer.rules());
        let mut hosts: Vec<String> = rules
            .filter(|rule| rule.verdict != Verdict::Deny)
            .flat_map(|rule| {
                let listed =
                    rule.target.hosts.iter().flat_map(|hosts| hosts.patterns.iter().map(HostPattern::to_string));
                let urls =
                    rule.target.urls.iter().flat_map(|urls| urls.patterns.iter().map(|url| url.text().to_owned()));
                listed.chain(urls).collect::<Vec<_>>()
            })
            .collect();
        hosts.sort();
        hosts.dedup();
        hosts
    }
}

/// Reads a network, or a single address.
///
/// # Errors
/// What is wrong with it, as the end of a sentence about it.
pub fn cidr(text: &str) -> Result<Cidr, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(Cidr::from(address.to_canonical()));
    }
    let network: Cidr = text.parse().map_err(|_said_below: ipnet::AddrParseError| {
        "is neither an address nor a network such as `10.0.0.0/8`".to_owned()
    })?;
    match network == network.trunc() {
        true => Ok(network),
        false => Err(format!("has bits set below its prefix; write `{}`", network.trunc())),
    }
}

/// Reads a host of the table of private addresses, which has no patterns.
///
/// # Errors
/// What is wrong with it, as the end of a sentence about it.
pub fn private_host(text: &str) -> Result<String, String> {
    match Host::parse(text) {
        Ok(host) => Ok(host.to_string()),
        Err(error) => Err(format!("is no host: {error}")),
    }
}

/// Reads where names are looked up: an address, with port 53 unless another is named.
///
/// # Errors
/// What is wrong with it, as the end of a sentence about it.
pub fn resolver(text: &str) -> Result<SocketAddr, String> {
    let whole = || text.parse::<SocketAddr>().ok().filter(|address| address.port() > 0);
    let alone = || text.parse::<IpAddr>().ok().map(|address| SocketAddr::new(address, 53));
    whole().or_else(alone).ok_or_else(|| "is no address; write one such as `127.0.0.1:5353` or `[::1]:53`".to_owned())
}
