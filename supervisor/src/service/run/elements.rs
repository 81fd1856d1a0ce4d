//! The one place where a run's stack is put together from what was asked for.

use super::{answering::Handlers, RunRequest};
use crate::{
    chain::{
        admission::Admission,
        approval::{Approval, Desk},
        containment::Containment,
        quota::{Amounts, Unit},
        secrets::Secrets,
        stack::{Element, Step},
    },
    effect::{self, RunId},
};
use std::sync::Arc;

/// The elements of a run's stack. Their order here does not matter: the stack's normal form has one of its own.
pub(super) fn elements(id: &RunId, request: &RunRequest, handlers: &Handlers, desk: &Arc<Desk>) -> Vec<Element> {
    let mut elements = handlers.elements();
    match &request.preflight {
        // Nothing is refused, so that one pass shows every need; what the policies would say is in the plan. It is the
        // innermost of those that answer, in the world's place for all of them.
        Some(preflight) => {
            let policies = &request.policy.admission;
            preflight
                .judge_by(guard_of_policies(request).map_or_else(|| policies.clone(), |guard| policies.narrow(&guard)));
            elements.push(Element::Admission(Admission::everything()));
            elements.push(Element::Answering(Step(preflight.clone())));
        }
        None => {
            elements.push(Element::Admission(request.policy.admission.clone()));
            elements.extend(guard_of_policies(request).map(Element::Admission));
        }
    }
    if let Some(resumption) = &request.resumes {
        elements.push(Element::Answering(Step(resumption.known.clone())));
    }
    if let Some(limit) = request.policy.limits.write_bytes.value() {
        elements.push(Element::Quota { id: id.0.clone(), unit: Unit::WriteBytes, limit });
    }
    if let Some(limit) = request.policy.limits.effects.value() {
        elements.push(Element::Quota { id: id.0.clone(), unit: Unit::Effects, limit });
    }
    if let Some(limit) = request.policy.limits.egress_bytes.value() {
        elements.push(Element::Quota { id: id.0.clone(), unit: Unit::EgressBytes, limit });
    }
    if request.policy.uses_network() {
        elements.push(Element::Containment(Step(Arc::new(Containment::new(&request.policy.network)))));
        if !request.policy.network.secrets.is_empty() {
            let secrets = Secrets::new(request.policy.network.secrets.clone());
            elements.push(Element::Containment(Step(Arc::new(secrets))));
        }
    }
    let shared = |(id, limits): &(String, Amounts)| Element::SharedQuota { id: id.clone(), limits: limits.clone() };
    elements.extend(request.quotas.iter().map(shared));
    elements.push(Element::Approval(Step(Arc::new(Approval::new(desk.clone())))));
    elements
}

/// A policy that lies in the workspace is not the program's to change for its next run: a person must agree.
fn guard_of_policies(request: &RunRequest) -> Option<Admission> {
    let inside = request.policy.sources.iter().filter_map(|source| {
        let path = source.canonicalize().ok()?;
        effect::path::workspace_path(path.strip_prefix(&request.workspace).ok()?).ok()
    });
    let paths: Vec<String> = inside.collect();
    (!paths.is_empty()).then(|| Admission::asking_about(&paths))
}
