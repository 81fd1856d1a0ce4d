//! The network door of a run: made before its jail, opened when the jail hands its sockets over, closed after it.

use super::{execute::Run, serving::Serving, RunRequest};
use crate::{
    chain::{
        admission::{Admission, Host, Kinds, Rule, Ruling, Verdict},
        containment::Containment,
        Answer, Chain,
    },
    doors::network::{self, authority::Authority, Parts, Route, Routes},
    effect::{self, net, Door, Effect, Kind, Subject},
    jail::{launch::NetworkSockets, spec},
    world::{
        http::Delivery,
        net::{AddressGuard, Outside},
        secrets::Vault,
    },
};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

/// What a run's network is made of before its jail stands.
pub(super) struct Network {
    authority: Arc<Authority>,
    host_ports: Vec<u16>,
    ports: Vec<u16>,
    vault: Arc<Vault>,
    /// Secrets without a value.
    pub(super) absent: Vec<String>,
}

impl Network {
    /// For a run whose policy leads anywhere; none for one whose program has its loopback and nothing else.
    ///
    /// # Errors
    ///
    /// Why the run's authority cannot be made, in one sentence.
    pub(super) fn of(run: &Run<'_>) -> Result<Option<Network>, String> {
        let policy = &run.request.policy;
        if !policy.uses_network() {
            return Ok(None);
        }
        let authority = Authority::new(&run.id.0).map_err(|error| error.to_string())?;
        let mut ports: Vec<u16> = rules(&policy.admission)
            .flat_map(|rule| rule.target.ports.iter().flatten().copied())
            .chain([80, 443])
            .collect();
        ports.sort_unstable();
        ports.dedup();
        let host_ports = policy.network.host_ports.clone();
        let opened = Vault::open(&policy.network.secrets, &run.request.environment);
        let (vault, absent) = opened.map_err(|error| error.to_string())?;
        if !vault.is_empty() {
            // No process of the same user may trace this one from now on, and no core dump holds what it knows
            // (prctl(2), PR_SET_DUMPABLE).
            let forbidden = nix::sys::prctl::set_dumpable(false);
            forbidden.map_err(|errno| format!("the run's secrets cannot be kept from other processes: {errno}"))?;
        }
        Ok(Some(Network { authority: Arc::new(authority), host_ports, ports, vault: Arc::new(vault), absent }))
    }

    /// What stands in the program's environment in the place of the secrets' values.
    pub(super) fn placeholders(&self) -> impl Iterator<Item = (&str, &str)> {
        self.vault.placeholders()
    }

    /// What the jail is given of it.
    pub(super) fn plan(&self) -> spec::Network {
        spec::Network::new(self.host_ports.clone(), self.ports.clone(), self.authority.pem().into_bytes())
    }

    /// The door, closed: nothing arrives before the jail stands.
    pub(super) fn door(
        self,
        request: &RunRequest,
        subject: &Subject,
        chain: &Arc<Chain>,
        delivery: Delivery,
    ) -> NetworkDoor {
        let policy = &request.policy;
        let guard = Arc::new(Guard(Containment::new(&policy.network)));
        let routes = PolicyRoutes { admission: policy.admission.clone(), subject: subject.clone() };
        let parts = Parts {
            chain: Arc::clone(chain),
            subject: subject.clone(),
            room: None,
            outside: Arc::new(Outside::new(policy.network.resolver, guard)),
            authority: self.authority,
            routes: Arc::new(routes),
            delivery,
            vault: self.vault,
        };
        NetworkDoor { parts: Some(parts), serving: None }
    }
}

/// The door of a run, and what serves it once it is open.
#[derive(Default)]
pub(super) struct NetworkDoor {
    parts: Option<Parts>,
    serving: Option<Serving>,
}

impl NetworkDoor {
    /// Serves the jail's sockets from here on.
    ///
    /// # Errors
    ///
    /// Where the jail made a network that was not asked for, or no thread is to be had.
    pub(super) fn open(&mut self, sockets: NetworkSockets) -> io::Result<()> {
        let parts =
            self.parts.take().ok_or_else(|| io::Error::other("the jail made a network that nobody asked for"))?;
        let serving = Serving::start("network", move |closing| async move {
            if let Err(error) = network::serve(sockets.listeners, sockets.names, parts, closing).await {
                // The program's connections then wait for an answer that never comes, and nothing gets out.
                tracing::error!(%error, "the network door cannot be served");
            }
        })?;
        self.serving = Some(serving);
        Ok(())
    }

    /// Whether somebody serves the jail's sockets.
    pub(super) fn is_open(&self) -> bool {
        self.serving.is_some()
    }

    /// Ends what is under way. The program is gone.
    pub(super) fn close(self) {
        if let Some(serving) = self.serving {
            serving.close();
        }
    }
}

fn rules(admission: &Admission) -> impl Iterator<Item = &Rule> {
    admission.layers().iter().flat_map(|layer| layer.rules())
}

/// Which kind of effect a connection becomes, by the run's policies.
struct PolicyRoutes {
    admission: Admission,
    subject: Subject,
}

impl Routes for PolicyRoutes {
    fn route(&self, host: &str, port: u16) -> Route {
        let request = net::Request::Connect { host: host.to_owned(), port, transport: net::Transport::Tcp };
        let connection = Effect {
            kind: Kind::NetConnect,
            resource: request.resource(),
            subject: self.subject.clone(),
            room: None,
            door: Door::Network,
            request: effect::Request::Net(request),
        };
        let as_bytes = match self.admission.rule_on(&connection) {
            Ruling::Allow { .. } | Ruling::Ask { .. } => true,
            Ruling::Deny { .. } | Ruling::Unmatched => false,
        };
        match (as_bytes, self.requests_may_reach(host, port)) {
            (false, _) => Route::Requests,
            (true, true) => Route::Either,
            (true, false) => Route::Bytes,
        }
    }
}

impl PolicyRoutes {
    fn requests_may_reach(&self, host: &str, port: u16) -> bool {
        let Ok(host) = Host::parse(host) else { return false };
        rules(&self.admission).filter(|rule| rule.verdict != Verdict::Deny).any(|rule| {
            let about_requests = matches!(&rule.kinds, Kinds::Only(kinds) if kinds.contains(&Kind::HttpRequest));
            let target = &rule.target;
            let by_host =
                || target.hosts.as_ref().is_none_or(|hosts| hosts.patterns.iter().any(|one| one.matches(&host)));
            let by_port = || target.ports.as_ref().is_none_or(|ports| ports.contains(&port));
            let by_url = || {
                let fits = |urls: &[_]| {
                    urls.iter().any(|one: &crate::chain::admission::UrlPattern| {
                        one.is_about(&host) && one.has_port_among(&[port])
                    })
                };
                target.urls.as_ref().is_none_or(|urls| fits(&urls.patterns))
            };
            about_requests && by_host() && by_port() && by_url()
        })
    }
}

/// Containment, as the world asks it.
struct Guard(Containment);

impl AddressGuard for Guard {
    fn check(&self, host: &str, port: u16, address: IpAddr) -> Result<(), Box<Answer>> {
        self.0.check_at(host, SocketAddr::new(address, port))
    }
}
