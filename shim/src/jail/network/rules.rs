//! The nf_tables table of a jail with a network: what is redirected to the supervisor, and what is dropped.

use super::{
    netlink::{Attributes, Message, Netlink, NEW, NLM_F_APPEND, NLM_F_REQUEST},
    NAMES,
};
use nix::sys::socket::SockProtocol;
use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr},
};

// linux/netfilter/nfnetlink.h.
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NFNL_SUBSYS_NFTABLES: u16 = 10;
/// `NFNETLINK_V0`.
const VERSION: u8 = 0;
// linux/netfilter.h.
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const NF_INET_LOCAL_OUT: u32 = 3;
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
// linux/netfilter/nf_tables.h, `enum nf_tables_msg_types`.
const NFT_MSG_NEWTABLE: u16 = 0;
const NFT_MSG_NEWCHAIN: u16 = 3;
const NFT_MSG_NEWRULE: u16 = 6;
// The same, attributes of tables, chains, hooks and rules.
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_CHAIN_POLICY: u16 = 5;
const NFTA_CHAIN_TYPE: u16 = 7;
const NFTA_HOOK_HOOKNUM: u16 = 1;
const NFTA_HOOK_PRIORITY: u16 = 2;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_LIST_ELEM: u16 = 1;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
// The same, registers and values.
const NFT_REG_VERDICT: u32 = 0;
const NFT_REG_1: u32 = 1;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CODE: u16 = 1;
// The same, expressions.
const NFTA_META_DREG: u16 = 1;
const NFTA_META_KEY: u16 = 2;
const NFT_META_NFPROTO: u32 = 15;
const NFT_META_L4PROTO: u32 = 16;
const NFTA_PAYLOAD_DREG: u16 = 1;
const NFTA_PAYLOAD_BASE: u16 = 2;
const NFTA_PAYLOAD_OFFSET: u16 = 3;
const NFTA_PAYLOAD_LEN: u16 = 4;
const NFT_PAYLOAD_NETWORK_HEADER: u32 = 1;
const NFT_PAYLOAD_TRANSPORT_HEADER: u32 = 2;
const NFTA_CMP_SREG: u16 = 1;
const NFTA_CMP_OP: u16 = 2;
const NFTA_CMP_DATA: u16 = 3;
const NFT_CMP_EQ: u32 = 0;
const NFTA_IMMEDIATE_DREG: u16 = 1;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_REDIR_REG_PROTO_MIN: u16 = 1;
const NFTA_NAT_TYPE: u16 = 1;
const NFTA_NAT_FAMILY: u16 = 2;
const NFTA_NAT_REG_ADDR_MIN: u16 = 3;
const NFT_NAT_DNAT: u32 = 1;
const NFTA_LOG_GROUP: u16 = 1;
const NFTA_LOG_SNAPLEN: u16 = 3;
const NFTA_LOG_QTHRESHOLD: u16 = 4;
// linux/netfilter_ipv4.h: `NF_IP_PRI_NAT_DST` and `NF_IP_PRI_FILTER`.
const PRIORITY_NAT: i32 = -100;
const PRIORITY_FILTER: i32 = 0;
// RFC 791 3.1 and RFC 8200 3: where the destination stands in a header; RFC 9293 3.1 and RFC 768: the port.
const IPV4_DESTINATION: u32 = 16;
const IPV6_DESTINATION: u32 = 24;
const DESTINATION_PORT: u32 = 2;

/// The table's name, as `nft list ruleset` shows it.
const TABLE: &str = "tollgate";
/// The chain that redirects.
const TAKE: &str = "take";
/// The chain that lets through what has a way, and drops the rest.
const KEEP: &str = "keep";

/// What the table does.
pub struct Rules<'a> {
    /// Where TCP connections are redirected to.
    pub listener: u16,
    /// A port of the loopback where nobody listens.
    pub nobody: u16,
    /// Ports of the loopback that are redirected too.
    pub host_ports: &'a [u16],
    /// The group that learns of dropped datagrams (linux/netfilter/nfnetlink_log.h), if anybody listens.
    pub told: Option<u16>,
}

/// Puts the table into this network namespace, all of it or nothing.
///
/// # Errors
/// The kernel's; `EPROTONOSUPPORT`, `EOPNOTSUPP` or `ENOENT` where it lacks a part.
pub fn install(rules: &Rules) -> io::Result<()> {
    Netlink::open(SockProtocol::NetlinkNetFilter)?.transact(batch(rules))
}

/// The messages of one transaction.
fn batch(rules: &Rules) -> Vec<Message> {
    let mut all = vec![boundary(NFNL_MSG_BATCH_BEGIN)];
    all.push(message(NFT_MSG_NEWTABLE).with(NFTA_TABLE_NAME, &name(TABLE)));
    all.push(chain(TAKE, "nat", PRIORITY_NAT, NF_ACCEPT));
    // What is not accepted below is dropped: the sender gets EPERM at once.
    all.push(chain(KEEP, "filter", PRIORITY_FILTER, NF_DROP));
    for port in rules.host_ports {
        let tcp_port = || all_of([tcp(), port_is(*port)]);
        all.push(rule(TAKE, all_of([to_v4(&[127, 0, 0, 1]), tcp_port(), redirect(rules.listener)])));
        all.push(rule(TAKE, all_of([to_v6(Ipv6Addr::LOCALHOST), tcp_port(), redirect(rules.listener)])));
    }
    // The listener is not the program's to find: asked for by its own number, it is not there.
    let listener = || all_of([tcp(), port_is(rules.listener), redirect(rules.nobody)]);
    all.push(rule(TAKE, all_of([to_v4(&[127]), listener()])));
    all.push(rule(TAKE, all_of([to_v6(Ipv6Addr::LOCALHOST), listener()])));
    // The program's own servers are none of our business.
    all.push(rule(TAKE, all_of([to_v4(&[127]), verdict(NF_ACCEPT)])));
    all.push(rule(TAKE, all_of([to_v6(Ipv6Addr::LOCALHOST), verdict(NF_ACCEPT)])));
    all.push(rule(TAKE, all_of([tcp(), redirect(rules.listener)])));
    // A program that asks a name server of its own choice gets the same answers.
    all.push(rule(TAKE, all_of([v4(), udp(), port_is(NAMES.port()), divert(*NAMES.ip())])));

    all.push(rule(KEEP, all_of([tcp(), verdict(NF_ACCEPT)])));
    all.push(rule(KEEP, all_of([to_v4(&[127]), verdict(NF_ACCEPT)])));
    all.push(rule(KEEP, all_of([to_v6(Ipv6Addr::LOCALHOST), verdict(NF_ACCEPT)])));
    let names = all_of([to_v4(&NAMES.ip().octets()), udp(), port_is(NAMES.port())]);
    all.push(rule(KEEP, all_of([names, verdict(NF_ACCEPT)])));
    if let Some(group) = rules.told {
        all.push(rule(KEEP, all_of([udp(), log(group)])));
    }
    all.push(boundary(NFNL_MSG_BATCH_END));
    all
}

fn boundary(kind: u16) -> Message {
    let [high, low] = NFNL_SUBSYS_NFTABLES.to_be_bytes();
    Message::new(kind, NLM_F_REQUEST, &[0, VERSION, high, low])
}

fn message(kind: u16) -> Message {
    let flags = if kind == NFT_MSG_NEWRULE { NEW | NLM_F_APPEND } else { NEW };
    Message::new(NFNL_SUBSYS_NFTABLES << 8 | kind, flags, &[NFPROTO_INET, VERSION, 0, 0])
}

fn chain(own: &str, kind: &str, priority: i32, policy: u32) -> Message {
    let hook = Attributes::new()
        .with(NFTA_HOOK_HOOKNUM, &NF_INET_LOCAL_OUT.to_be_bytes())
        .with(NFTA_HOOK_PRIORITY, &priority.to_be_bytes());
    message(NFT_MSG_NEWCHAIN)
        .with(NFTA_CHAIN_TABLE, &name(TABLE))
        .with(NFTA_CHAIN_NAME, &name(own))
        .with_nested(NFTA_CHAIN_HOOK, &hook)
        .with(NFTA_CHAIN_POLICY, &policy.to_be_bytes())
        .with(NFTA_CHAIN_TYPE, &name(kind))
}

/// An expression: its name and its attributes.
type Expression = (&'static str, Attributes);

fn rule(chain: &str, expressions: Vec<Expression>) -> Message {
    let list = expressions.into_iter().fold(Attributes::new(), |list, (kind, data)| {
        let one = Attributes::new().with(NFTA_EXPR_NAME, &name(kind)).with_nested(NFTA_EXPR_DATA, &data);
        list.with_nested(NFTA_LIST_ELEM, &one)
    });
    message(NFT_MSG_NEWRULE)
        .with(NFTA_RULE_TABLE, &name(TABLE))
        .with(NFTA_RULE_CHAIN, &name(chain))
        .with_nested(NFTA_RULE_EXPRESSIONS, &list)
}

fn all_of<const N: usize>(parts: [Vec<Expression>; N]) -> Vec<Expression> {
    parts.into_iter().flatten().collect()
}

fn name(text: &str) -> Vec<u8> {
    [text.as_bytes(), b"\0"].concat()
}

fn meta(key: u32) -> Expression {
    ("meta", Attributes::new().with(NFTA_META_DREG, &NFT_REG_1.to_be_bytes()).with(NFTA_META_KEY, &key.to_be_bytes()))
}

fn payload(base: u32, offset: u32, length: usize) -> Expression {
    let data = Attributes::new()
        .with(NFTA_PAYLOAD_DREG, &NFT_REG_1.to_be_bytes())
        .with(NFTA_PAYLOAD_BASE, &base.to_be_bytes())
        .with(NFTA_PAYLOAD_OFFSET, &offset.to_be_bytes())
        .with(NFTA_PAYLOAD_LEN, &(length as u32).to_be_bytes());
    ("payload", data)
}

fn equals(value: &[u8]) -> Expression {
    let data = Attributes::new()
        .with(NFTA_CMP_SREG, &NFT_REG_1.to_be_bytes())
        .with(NFTA_CMP_OP, &NFT_CMP_EQ.to_be_bytes())
        .with_nested(NFTA_CMP_DATA, &Attributes::new().with(NFTA_DATA_VALUE, value));
    ("cmp", data)
}

fn v4() -> Vec<Expression> {
    vec![meta(NFT_META_NFPROTO), equals(&[NFPROTO_IPV4])]
}

/// IPv4, to an address that begins with these bytes.
fn to_v4(prefix: &[u8]) -> Vec<Expression> {
    all_of([v4(), vec![payload(NFT_PAYLOAD_NETWORK_HEADER, IPV4_DESTINATION, prefix.len()), equals(prefix)]])
}

fn to_v6(address: Ipv6Addr) -> Vec<Expression> {
    let address = address.octets();
    vec![
        meta(NFT_META_NFPROTO),
        equals(&[NFPROTO_IPV6]),
        payload(NFT_PAYLOAD_NETWORK_HEADER, IPV6_DESTINATION, address.len()),
        equals(&address),
    ]
}

fn tcp() -> Vec<Expression> {
    vec![meta(NFT_META_L4PROTO), equals(&[libc::IPPROTO_TCP as u8])]
}

fn udp() -> Vec<Expression> {
    vec![meta(NFT_META_L4PROTO), equals(&[libc::IPPROTO_UDP as u8])]
}

fn port_is(port: u16) -> Vec<Expression> {
    vec![payload(NFT_PAYLOAD_TRANSPORT_HEADER, DESTINATION_PORT, 2), equals(&port.to_be_bytes())]
}

fn immediate(value: &[u8]) -> Expression {
    let data = Attributes::new()
        .with(NFTA_IMMEDIATE_DREG, &NFT_REG_1.to_be_bytes())
        .with_nested(NFTA_IMMEDIATE_DATA, &Attributes::new().with(NFTA_DATA_VALUE, value));
    ("immediate", data)
}

fn verdict(code: u32) -> Vec<Expression> {
    let code = Attributes::new().with(NFTA_VERDICT_CODE, &code.to_be_bytes());
    let data = Attributes::new()
        .with(NFTA_IMMEDIATE_DREG, &NFT_REG_VERDICT.to_be_bytes())
        .with_nested(NFTA_IMMEDIATE_DATA, &Attributes::new().with_nested(NFTA_DATA_VERDICT, &code));
    vec![("immediate", data)]
}

/// To this port of the loopback: what the kernel's own `redirect` means for what is sent from here.
fn redirect(port: u16) -> Vec<Expression> {
    let data = Attributes::new().with(NFTA_REDIR_REG_PROTO_MIN, &NFT_REG_1.to_be_bytes());
    vec![immediate(&port.to_be_bytes()), ("redir", data)]
}

/// To this address, the port as it is.
fn divert(to: Ipv4Addr) -> Vec<Expression> {
    let data = Attributes::new()
        .with(NFTA_NAT_TYPE, &NFT_NAT_DNAT.to_be_bytes())
        .with(NFTA_NAT_FAMILY, &u32::from(NFPROTO_IPV4).to_be_bytes())
        .with(NFTA_NAT_REG_ADDR_MIN, &NFT_REG_1.to_be_bytes());
    vec![immediate(&to.octets()), ("nat", data)]
}

fn log(group: u16) -> Vec<Expression> {
    let data = Attributes::new()
        .with(NFTA_LOG_GROUP, &group.to_be_bytes())
        .with(NFTA_LOG_SNAPLEN, &super::refused::HEADERS.to_be_bytes())
        // One packet, one message: whoever waits for the receipt waits for nothing else.
        .with(NFTA_LOG_QTHRESHOLD, &1_u16.to_be_bytes());
    vec![("log", data)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(rules: &Rules) -> Vec<Vec<u8>> {
        batch(rules).into_iter().map(|message| message.finish(0)).collect()
    }

    fn holds(message: &[u8], part: &[u8]) -> bool {
        message.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn a_transaction_has_both_its_ends_and_drops_what_it_does_not_name() {
        let messages = encoded(&Rules { listener: 1, nobody: 2, host_ports: &[], told: None });
        let kind = |message: &[u8]| u16::from_ne_bytes([message[4], message[5]]);
        assert_eq!(messages.first().map(|message| kind(message)), Some(NFNL_MSG_BATCH_BEGIN));
        assert_eq!(messages.last().map(|message| kind(message)), Some(NFNL_MSG_BATCH_END));
        let policy = Attributes::new().with(NFTA_CHAIN_POLICY, &NF_DROP.to_be_bytes());
        let policy = Message::new(0, 0, &[]).with_nested(0, &policy).finish(0)[20..].to_vec();
        assert!(messages.iter().any(|message| holds(message, b"filter\0") && holds(message, &policy)));
        assert!(!messages.iter().any(|message| holds(message, b"log\0")));
    }

    #[test]
    fn granted_ports_are_taken_before_the_loopback_is_left_to_the_program() {
        let messages = encoded(&Rules { listener: 1, nobody: 2, host_ports: &[5432], told: Some(1) });
        let of_port = |message: &Vec<u8>| holds(message, &5432_u16.to_be_bytes()) && holds(message, b"redir\0");
        let granted: Vec<usize> = (0..messages.len()).filter(|&at| of_port(&messages[at])).collect();
        let left = messages
            .iter()
            .position(|message| holds(message, b"take\0") && holds(message, &[127]) && !holds(message, b"redir\0"));
        assert_eq!(granted.len(), 2, "IPv4 and IPv6");
        assert!(granted.iter().all(|at| Some(*at) < left), "{granted:?} {left:?}");
        assert!(messages.iter().any(|message| holds(message, b"log\0")));
    }
}
