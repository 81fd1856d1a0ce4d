//! Containment: is this address one that a name from outside may lead to?
//!
//! A name is whatever its owner says, and its owner may say that it is at 169.254.169.254. So every address is looked at
//! when it is dialled, not when its name was admitted: only public ones pass, and others where the policy names them for
//! that very host. The sources are IANA's special-purpose registries (iana.org/assignments/iana-ipv4-special-registry,
//! …/iana-ipv6-special-registry); addresses that hold another within them count as what they hold.
//!
//! As a handler it refuses what names such an address itself, before anything further in answers. The world asks
//! [`Containment::check_at`] for each address that it is about to dial.

use super::{admission::Host, Answer, BoxFuture, Handler, Next};
use crate::{
    effect::{http, net, path::shell_word, Effect, Request},
    policy::network::{Cidr, Network},
};
use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

const NAME: &str = "containment";

/// What an address is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AddressClass {
    /// Anybody's, on the Internet.
    Public,
    /// This host: 127.0.0.0/8, ::1.
    Loopback,
    /// A network of somebody's own: RFC 1918, fc00::/7, fec0::/10.
    Private,
    /// This link: 169.254.0.0/16, fe80::/10.
    LinkLocal,
    /// Where clouds give credentials to their machines.
    Metadata,
    /// Behind a provider's translation: 100.64.0.0/10, RFC 6598.
    CarrierNat,
    /// Many at once.
    Multicast,
    /// All at once.
    Broadcast,
    /// For examples, and nobody's.
    Documentation,
    /// For measurements of networks: RFC 2544, RFC 5180. The door itself uses 198.18.0.0/15.
    Benchmarking,
    /// No address: 0.0.0.0/8, ::. Linux takes 0.0.0.0 for this host.
    Unspecified,
    /// Kept for something else.
    Reserved,
}

impl AddressClass {
    /// What it is called in a sentence.
    pub const fn name(self) -> &'static str {
        match self {
            AddressClass::Public => "public",
            AddressClass::Loopback => "a loopback address",
            AddressClass::Private => "an address of a private network",
            AddressClass::LinkLocal => "a link-local address",
            AddressClass::Metadata => "an address where clouds give out credentials",
            AddressClass::CarrierNat => "an address behind a provider's translation",
            AddressClass::Multicast => "a multicast address",
            AddressClass::Broadcast => "the broadcast address",
            AddressClass::Documentation => "an address for documentation",
            AddressClass::Benchmarking => "an address for benchmarks",
            AddressClass::Unspecified => "no address of a host",
            AddressClass::Reserved => "a reserved address",
        }
    }
}

impl fmt::Display for AddressClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Addresses at which clouds serve metadata and credentials. Amazon EC2, Azure, Google Cloud and others
/// (169.254.169.254); Amazon ECS tasks and EKS pods; Azure's wire server; Alibaba Cloud; Oracle Cloud.
const METADATA_V4: [Ipv4Addr; 6] = [
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];

/// The same on IPv6: Amazon EC2, EKS pods, Google Cloud.
const METADATA_V6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];

/// What an address is for; one that holds another within it counts as what it holds.
pub fn class_of(address: IpAddr) -> AddressClass {
    match address {
        IpAddr::V4(address) => class_of_v4(address),
        IpAddr::V6(address) => class_of_v6(address),
    }
}

fn class_of_v4(address: Ipv4Addr) -> AddressClass {
    if METADATA_V4.contains(&address) {
        return AddressClass::Metadata;
    }
    match address.octets() {
        [0, ..] => AddressClass::Unspecified,
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => AddressClass::Private,
        [100, 64..=127, ..] => AddressClass::CarrierNat,
        [127, ..] => AddressClass::Loopback,
        [169, 254, ..] => AddressClass::LinkLocal,
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => AddressClass::Documentation,
        // Protocol assignments, RFC 6890; the relays of 6to4, which RFC 7526 took out of use.
        [192, 0, 0, _] | [192, 88, 99, _] => AddressClass::Reserved,
        [198, 18..=19, ..] => AddressClass::Benchmarking,
        [224..=239, ..] => AddressClass::Multicast,
        [255, 255, 255, 255] => AddressClass::Broadcast,
        [240..=255, ..] => AddressClass::Reserved,
        _ => AddressClass::Public,
    }
}

fn class_of_v6(address: Ipv6Addr) -> AddressClass {
    if METADATA_V6.contains(&address) {
        return AddressClass::Metadata;
    }
    let segments = address.segments();
    let octets = address.octets();
    let v4_at = |place: usize| Ipv4Addr::new(octets[place], octets[place + 1], octets[place + 2], octets[place + 3]);
    let last = v4_at(12);
    // What is not public within one that may be public; what holds one and is not public itself stays so.
    let held = |within: AddressClass, otherwise: AddressClass| match within {
        AddressClass::Public => otherwise,
        other => other,
    };
    match segments {
        [0, 0, 0, 0, 0, 0, 0, 0] => AddressClass::Unspecified,
        [0, 0, 0, 0, 0, 0, 0, 1] => AddressClass::Loopback,
        // IPv4-compatible, RFC 4291, 2.5.5.1; mapped, 2.5.5.2; translated, RFC 2765, 2.1.
        [0, 0, 0, 0, 0, 0, ..] => held(class_of_v4(last), AddressClass::Reserved),
        [0, 0, 0, 0, 0, 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => class_of_v4(last),
        // NAT64, RFC 6052.
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => class_of_v4(last),
        // NAT64 for local use, RFC 8215: with a prefix of 48 bits (RFC 6052, 2.2) or of 96.
        [0x64, 0xff9b, 1, ..] => {
            let spread = Ipv4Addr::new(octets[6], octets[7], octets[9], octets[10]);
            let within = if octets[11..].iter().all(|octet| *octet == 0) { spread } else { last };
            held(class_of_v4(within), AddressClass::Private)
        }
        // Discard only, RFC 6666; dummy, RFC 9780.
        [0x100, ..] => AddressClass::Reserved,
        // Teredo, RFC 4380: the server, and the client with its bits turned around. Long out of use.
        [0x2001, 0, ..] => {
            let client = Ipv4Addr::from(!u32::from(last));
            held(class_of_v4(client), held(class_of_v4(v4_at(4)), AddressClass::Reserved))
        }
        [0x2001, 2, 0, ..] => AddressClass::Benchmarking,
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0x0fff, ..] => AddressClass::Documentation,
        // Protocol assignments, RFC 2928.
        [0x2001, 0..=0x01ff, ..] => AddressClass::Reserved,
        // 6to4, RFC 3056.
        [0x2002, ..] => class_of_v4(v4_at(2)),
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => AddressClass::Private,
        [0xfe80..=0xfebf, ..] => AddressClass::LinkLocal,
        [0xff00..=0xffff, ..] => AddressClass::Multicast,
        // ISATAP, RFC 5214, 6.1: whatever the prefix.
        [0x2000..=0x3fff, _, _, _, 0 | 0x200, 0x5efe, ..] => class_of_v4(last),
        [0x2000..=0x3fff, ..] => AddressClass::Public,
        // Nothing else is given out for the Internet.
        _ => AddressClass::Reserved,
    }
}

/// The handler, for one run, and what the world asks when it dials.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Containment {
    private: BTreeMap<String, Vec<Cidr>>,
    host_ports: Vec<u16>,
}

impl Containment {
    /// With what a policy names.
    pub fn new(network: &Network) -> Containment {
        Containment { private: network.private.clone(), host_ports: network.host_ports.clone() }
    }

    /// Whether this host may be at this address.
    ///
    /// # Errors
    /// The refusal.
    pub fn check(&self, host: &str, address: IpAddr) -> Result<(), Box<Answer>> {
        let class = class_of(address);
        if class == AddressClass::Public {
            return Ok(());
        }
        let name = Host::parse(host).map_or_else(|_| host.to_owned(), |host| host.to_string());
        let canonical = address.to_canonical();
        let whole = |network: &Cidr| network.prefix_len() == network.max_prefix_len();
        // Whoever names a network does not think of the credentials within it.
        let names =
            |network: &&Cidr| network.contains(&canonical) && (class != AddressClass::Metadata || whole(network));
        if self.private.get(&name).is_some_and(|networks| networks.iter().any(|network| names(&network))) {
            return Ok(());
        }
        let at = match Host::parse(&name) {
            Ok(Host::Address(_)) => format!("{name} is {class}"),
            _ => format!("{name} is at {canonical}, which is {class}"),
        };
        let named = match self.private.contains_key(&name) {
            true if class == AddressClass::Metadata => {
                ": the policy names a network around it, and not the address itself"
            }
            true => ": the policy names other addresses for it",
            false => "",
        };
        let flag = shell_word(&format!("{name}={canonical}"));
        Err(Box::new(Answer::refused(
            NAME,
            format!("{at}{named}"),
            format!(
                "if the run is to reach it, start it with `--private {flag}`, or add to the policy: [network.private] \
                 \"{name}\" = [\"{canonical}\"]"
            ),
        )))
    }

    /// Whether this host may be dialled at this address and port: as [`Containment::check`], and the granted ports of
    /// the host's own loopback.
    ///
    /// # Errors
    /// The refusal.
    pub fn check_at(&self, host: &str, at: SocketAddr) -> Result<(), Box<Answer>> {
        match self.is_granted(at) {
            true => Ok(()),
            false => self.check(host, at.ip()),
        }
    }

    fn is_granted(&self, at: SocketAddr) -> bool {
        let own = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        own.contains(&at.ip()) && self.host_ports.contains(&at.port())
    }

    /// What it refuses of an effect before anything is looked up: a host that is such an address itself.
    pub fn refusal(&self, effect: &Effect) -> Option<Answer> {
        let (host, port) = match &effect.request {
            Request::Http(http::Request { host, port, .. }) => (host, *port),
            Request::Net(net::Request::Connect { host, port, .. }) => (host, *port),
            Request::Net(net::Request::Resolve { .. } | net::Request::Accept { .. })
            | Request::Fs(_)
            | Request::Run(_)
            | Request::Jail(_)
            | Request::Api(_)
            | Request::Program(_) => return None,
        };
        let Ok(Host::Address(address)) = Host::parse(host) else { return None };
        let refused = self.check_at(host, SocketAddr::new(address, port)).err()?;
        Some(Answer { reason: format!("{} {}: {}", effect.kind, effect.resource, refused.reason), ..*refused })
    }
}

impl Handler for Containment {
    fn name(&self) -> &'static str {
        NAME
    }

    fn handle<'a>(&'a self, effect: &'a Effect, next: Next<'a>) -> BoxFuture<'a, Answer> {
        match self.refusal(effect) {
            Some(refused) => Box::pin(std::future::ready(refused)),
            None => next.run(effect),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        chain::{
            testing::{ask, wait, FakeWorld},
            Decision,
        },
        effect::tests::{connect, http, resolve, sample},
        effect::Kind,
    };
    use proptest::prelude::*;
    use std::sync::Arc;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn addresses_are_what_the_registries_say() {
        use AddressClass::*;
        for (text, class) in [
            ("8.8.8.8", Public),
            ("1.1.1.1", Public),
            ("172.15.255.255", Public),
            ("172.32.0.0", Public),
            ("100.63.255.255", Public),
            ("100.128.0.0", Public),
            ("198.17.255.255", Public),
            ("198.20.0.0", Public),
            ("223.255.255.255", Public),
            ("192.0.1.0", Public),
            ("169.253.255.255", Public),
            ("0.0.0.0", Unspecified),
            ("0.1.2.3", Unspecified),
            ("10.0.0.1", Private),
            ("172.16.0.1", Private),
            ("172.31.255.255", Private),
            ("192.168.1.1", Private),
            ("127.0.0.1", Loopback),
            ("127.255.255.254", Loopback),
            ("169.254.1.1", LinkLocal),
            ("169.254.169.254", Metadata),
            ("169.254.170.2", Metadata),
            ("168.63.129.16", Metadata),
            ("100.100.100.200", Metadata),
            ("192.0.0.192", Metadata),
            ("100.64.0.1", CarrierNat),
            ("192.0.0.1", Reserved),
            ("192.0.2.1", Documentation),
            ("198.51.100.1", Documentation),
            ("203.0.113.1", Documentation),
            ("192.88.99.1", Reserved),
            ("198.18.0.1", Benchmarking),
            ("198.19.255.255", Benchmarking),
            ("224.0.0.1", Multicast),
            ("239.255.255.255", Multicast),
            ("240.0.0.1", Reserved),
            ("255.255.255.255", Broadcast),
            ("2606:4700:4700::1111", Public),
            ("2a00::1", Public),
            ("::", Unspecified),
            ("::1", Loopback),
            ("::127.0.0.1", Loopback),
            ("::8.8.8.8", Reserved),
            ("::ffff:127.0.0.1", Loopback),
            ("::ffff:10.0.0.1", Private),
            ("::ffff:169.254.169.254", Metadata),
            ("::ffff:8.8.8.8", Public),
            ("::ffff:0:10.0.0.1", Private),
            ("64:ff9b::127.0.0.1", Loopback),
            ("64:ff9b::a9fe:a9fe", Metadata),
            ("64:ff9b::8.8.8.8", Public),
            ("64:ff9b:1::10.0.0.1", Private),
            ("64:ff9b:1:7f00:0:100::", Loopback),
            ("64:ff9b:1::8.8.8.8", Private),
            ("2002:7f00:1::", Loopback),
            ("2002:a9fe:a9fe::1", Metadata),
            ("2002:808:808::1", Public),
            ("2001:0:808:808:0:0:80ff:fffe", Loopback),
            ("2001:0:a00:1:0:0:f7f7:f7f7", Private),
            ("2001:0:808:808:0:0:f7f7:f7f7", Reserved),
            ("2a00::5efe:10.0.0.1", Private),
            ("2a00::200:5efe:127.0.0.1", Loopback),
            ("2a00::5efe:8.8.8.8", Public),
            ("fe80::5efe:8.8.8.8", LinkLocal),
            ("fe80::1", LinkLocal),
            ("febf::1", LinkLocal),
            ("fec0::1", Private),
            ("fc00::1", Private),
            ("fdff::1", Private),
            ("fd00:ec2::254", Metadata),
            ("fd20:ce::254", Metadata),
            ("ff02::1", Multicast),
            ("2001:db8::1", Documentation),
            ("3fff:fff::1", Documentation),
            ("3fff:1000::1", Public),
            ("2001:2::1", Benchmarking),
            ("2001:10::1", Reserved),
            ("2001:200::1", Public),
            ("100::1", Reserved),
            ("5f00::1", Reserved),
            ("4000::1", Reserved),
            ("e000::1", Reserved),
        ] {
            assert_eq!(class_of(address(text)), class, "{text}");
        }
    }

    fn guard(private: &[(&str, &str)], host_ports: &[u16]) -> Containment {
        let mut network = Network { host_ports: host_ports.to_vec(), ..Network::default() };
        for (host, networks) in private {
            let networks = networks.split(' ').map(|text| crate::policy::network::cidr(text).unwrap());
            network.private.insert((*host).to_owned(), networks.collect());
        }
        Containment::new(&network)
    }

    #[test]
    fn an_address_that_is_not_public_passes_only_for_the_host_that_the_policy_names_it_for() {
        let guard = guard(&[("api.test", "10.1.0.0/16 ::1"), ("127.0.0.1", "127.0.0.1")], &[]);
        for (host, at, passes) in [
            ("api.test", "8.8.8.8", true),
            ("api.test", "10.1.2.3", true),
            ("API.test.", "10.1.2.3", true),
            ("api.test", "::ffff:10.1.2.3", true),
            ("api.test", "64:ff9b::10.1.2.3", false),
            ("api.test", "10.2.0.1", false),
            ("api.test", "127.0.0.1", false),
            ("api.test", "::1", true),
            ("other.test", "10.1.2.3", false),
            ("x.api.test", "10.1.2.3", false),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.2", false),
        ] {
            assert_eq!(guard.check(host, address(at)).is_ok(), passes, "{host} at {at}");
        }
    }

    #[test]
    fn an_address_of_credentials_is_named_itself_or_not_at_all() {
        let around = guard(&[("api.test", "0.0.0.0/0 ::/0")], &[]);
        assert!(around.check("api.test", address("169.254.1.1")).is_ok());
        for at in ["169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "168.63.129.16"] {
            let refused = around.check("api.test", address(at)).unwrap_err();
            assert!(refused.reason.contains("credentials"), "{refused:?}");
        }
        assert!(guard(&[("api.test", "169.254.169.254")], &[]).check("api.test", address("169.254.169.254")).is_ok());
    }

    #[test]
    fn a_granted_port_of_the_hosts_loopback_passes_and_its_neighbour_does_not() {
        let guard = guard(&[], &[5432]);
        for (at, passes) in
            [("127.0.0.1:5432", true), ("[::1]:5432", true), ("127.0.0.1:5433", false), ("127.0.0.2:5432", false)]
        {
            let at: SocketAddr = at.parse().unwrap();
            assert_eq!(guard.check_at("localhost", at).is_ok(), passes, "{at}");
        }
    }

    #[test]
    fn a_refusal_names_host_address_class_and_the_option_to_add() {
        let refused = guard(&[], &[]).check("Api.test", address("10.1.2.3")).unwrap_err();
        assert_eq!((refused.decision, refused.decided_by), (Decision::Refused, "containment"));
        assert_eq!(refused.reason, "api.test is at 10.1.2.3, which is an address of a private network");
        assert_eq!(
            refused.hint,
            "if the run is to reach it, start it with `--private api.test=10.1.2.3`, or add to the policy: \
             [network.private] \"api.test\" = [\"10.1.2.3\"]"
        );
    }

    #[test]
    fn an_effect_on_such_an_address_is_refused_before_anything_answers_it() {
        let guard = Arc::new(guard(&[("10.1.2.3", "10.1.2.3")], &[5432]));
        let world = FakeWorld::default();
        for (effect, passes) in [
            (connect("127.0.0.1", 22), false),
            (connect("::1", 22), false),
            (connect("::ffff:127.0.0.1", 22), false),
            (connect("127.0.0.1", 5432), true),
            (connect("10.1.2.3", 22), true),
            (connect("8.8.8.8", 22), true),
            (connect("api.test", 22), true),
            (http("GET", "http://169.254.169.254/latest/meta-data/"), false),
            (http("GET", "http://[fd00:ec2::254]/"), false),
            (http("GET", "http://api.test/"), true),
            (resolve("api.test"), true),
            (sample(Kind::FsWrite), true),
        ] {
            let answer = wait(ask(vec![guard.clone()], &effect, &world));
            assert_eq!(answer.is_success(), passes, "{effect:?}");
            assert!(passes || (answer.decided_by == "containment" && answer.reason.contains("is a")), "{answer:?}");
        }
    }

    fn wrapped(v4: Ipv4Addr) -> Vec<Ipv6Addr> {
        let [a, b, c, d] = v4.octets();
        let (high, low) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        vec![
            v4.to_ipv6_mapped(),
            Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0, 0x5efe, high, low),
            Ipv6Addr::new(0x2a00, 1, 2, 3, 0x200, 0x5efe, high, low),
        ]
    }

    proptest! {
        #[test]
        fn an_address_within_another_is_what_it_is_alone(bits in any::<u32>(), low in 0u32..4) {
            let corners = [0x7f00_0000, 0x0a00_0000, 0xa9fe_a9fe, 0xc0a8_0000];
            for v4 in [Ipv4Addr::from(bits), Ipv4Addr::from(corners[low as usize] ^ (bits & 1))] {
                for v6 in wrapped(v4) {
                    prop_assert_eq!(class_of(v6.into()), class_of(v4.into()), "{} in {}", v4, v6);
                }
                let client = u32::from(v4) ^ u32::MAX;
                let (high, low) = ((client >> 16) as u16, client as u16);
                let teredo = Ipv6Addr::new(0x2001, 0, 0x808, 0x808, 0, 0, high, low);
                prop_assert_ne!(class_of(teredo.into()), AddressClass::Public);
            }
        }

        #[test]
        fn nothing_but_public_passes_without_the_policys_word(bits in any::<u128>(), v4 in any::<u32>()) {
            let guard = Containment::default();
            for at in [IpAddr::V6(Ipv6Addr::from(bits)), IpAddr::V4(Ipv4Addr::from(v4))] {
                prop_assert_eq!(guard.check("api.test", at).is_ok(), class_of(at) == AddressClass::Public);
            }
        }

        /// What the standard library knows to be special is never public here.
        #[test]
        fn what_the_standard_library_calls_special_is_not_public(v4 in any::<u32>(), bits in any::<u128>()) {
            let v4 = Ipv4Addr::from(v4);
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_documentation()
                || v4.is_multicast() || v4.is_broadcast() || v4.is_unspecified()
            {
                prop_assert_ne!(class_of(v4.into()), AddressClass::Public);
            }
            let v6 = Ipv6Addr::from(bits);
            if v6.is_unique_local() || v6.is_unicast_link_local() || v6.is_multicast() || v6.is_loopback() {
                prop_assert_ne!(class_of(v6.into()), AddressClass::Public);
            }
        }
    }
}
