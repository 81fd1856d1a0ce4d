//! What the API door refused before it could become an effect of another kind.
//!
//! A malformed request, an unknown kind, or a request that names its own subject never reaches the world. This kind
//! exists so that such an attempt has a receipt like any other.

use super::{Class, Declaration, Idempotency, Kind, Size, StandIn};
use serde::{Deserialize, Serialize};

/// A request that is no effect.
pub const REQUEST: Declaration = Declaration {
    kind: Kind::ApiRequest,
    name: "api/request",
    classes: &[Class::Read],
    idempotency: Idempotency::Idempotent,
    resource: "the run's id",
    summary: "Make a request at the API door that is no effect. Only ever refused.",
    at_api_door: false,
    stand_in: StandIn::Nothing,
    size: Size::Nothing,
    faults: &[],
};

/// What was wrong. Both are from closed lists of the door, so that repetitions count as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The error's type, as the one who asked was told it: `unknown-kind`, `identity-in-request`.
    pub problem: String,
    /// The route, `METHOD /path`, or `other`.
    pub route: String,
}
