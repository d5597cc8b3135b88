package stage

import (
	"math"
	"time"
)

// Percentile is the smallest of the sorted values that at least p per cent do not exceed.
func Percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

// Milliseconds is a time in ms, rounded for reports.
func Milliseconds(d time.Duration) float64 { return Round(d.Seconds()*1000, 2) }

// Round rounds to so many digits after the point.
func Round(x float64, digits int) float64 {
	scale := math.Pow10(digits)
	return math.Round(x*scale) / scale
}
